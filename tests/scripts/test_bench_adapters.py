"""The benchmark of adapters: what it says of frameworks, from what their ranks measured."""

import json
from pathlib import Path

import bench_adapters
import pytest
from adapter_loops.job import SERVED, job
from adapter_loops.measuring import MEASURED, PATCH_COST, ROWS, STEPS, TOKEN_COST, WARM, Load, Meter, code_lines
from bench_adapters import FRAMEWORKS, JUDGED, Measured, RankReport
from make_demo_shards import make_shards

from dataserver.planning.job.spec import Execution


def runs(cpu_ms: float, padding: float, excess: float) -> list[Measured]:
    return [Measured(cpu_ms * busy, 0.1, padding, excess, 30, 1000) for busy in (1.0, 2.0, 1.5)]


def measured(served: list[Measured]) -> bench_adapters.Found:
    framework = FRAMEWORKS[0]
    others = {(framework.name, loader): runs(2.0, 0.3, 0.04) for loader in (JUDGED, *framework.others)}
    return {**others, (framework.name, SERVED): served}


@pytest.mark.parametrize(
    ("served", "missed"),
    [
        (runs(0.7, 0.0, 0.03), []),
        (runs(0.72, 0.0, 0.03), ["CPU"]),
        (runs(0.7, 0.3, 0.03), ["padding"]),
        (runs(0.7, 0.0, 0.05), ["imbalance"]),
    ],
)
def test_each_target_is_judged(served: list[Measured], missed: list[str]) -> None:
    rows = list(bench_adapters.rows(measured(served)))
    judged = [row for row in rows if row.reached is not None]
    assert len(judged) == 3
    assert [row.name.split(": ")[1].split(",")[0].split()[0] for row in judged if not row.reached] == missed


def test_frameworks_that_were_not_measured_are_named_with_the_reason_and_judged_by_nobody() -> None:
    rows = {row.name: row for row in bench_adapters.rows({}, failed={"Grain": "no such release"})}
    assert rows["Grain"].measured == "not measured: no such release"
    assert set(rows) == {f.name for f in FRAMEWORKS}
    assert all(row.reached is None and row.measured.startswith("not ") for row in rows.values())


def test_a_run_from_the_reports_of_its_ranks() -> None:
    one, other = RankReport(30, 100, [10, 30], 60, 0.5, 1.0), RankReport(30, 100, [10, 10], 60, 0.3, 0.0)
    found = Measured.of([one, other])
    assert found == Measured(4.0, 5.0, pytest.approx(0.5), pytest.approx(0.25), 30, 200)


def test_a_meter_counts_the_steps_between_warm_up_and_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("adapter_loops.measuring.UNIT_S", 0.0)
    clock = iter((2.0, 5.0))
    meter = Meter(tmp_path, lambda: next(clock), runs)
    for number in range(STEPS * ROWS):
        early = number < WARM * ROWS
        meter.microbatch(Load(images=6, tokens=0 if early else 10, patches=4, token_slots=20, patch_slots=4))
    found = RankReport(**json.loads((tmp_path / "1.json").read_text()))
    cost = ROWS * (10 * TOKEN_COST + 4 * PATCH_COST)
    assert (found.images, found.cost) == (6 * ROWS * MEASURED, [cost] * MEASURED)
    assert found.handed == MEASURED * ROWS * (20 * TOKEN_COST + 4 * PATCH_COST)
    assert (found.wait_s, found.lines) == (3.0, 2)
    assert 0 <= found.cpu_s < 1


def documented() -> int:
    """A docstring."""
    # a comment

    return 1


def test_lines_of_code_are_those_that_do_something() -> None:
    assert code_lines(documented) == 2
    assert code_lines(documented, runs) == 4


def test_the_job_costs_what_the_meter_counts() -> None:
    execution = Execution.model_validate_json(json.dumps(job()["execution"]))
    modules = {module.name: module for module in execution.modules}
    assert modules["llm"].cost.linear_ps / modules["vision"].cost.linear_ps == TOKEN_COST / PATCH_COST


def test_samples_of_ones_own_have_the_tokens_that_ours_have(tmp_path: Path) -> None:
    from adapter_loops.samples import IMAGE, Images, lengths

    images = Images(make_shards(tmp_path, num_samples=8, num_shards=2), "fast")
    assert len(images) == 8
    found = [images[i] for i in range(8)]
    assert [len(sample["tokens"]) for sample in found] == lengths(images)
    for sample in found:
        assert (sample["tokens"] == IMAGE).sum() == len(sample["patches"]) // 4
