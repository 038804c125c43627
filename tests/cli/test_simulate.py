"""`dataserver simulate` on real indexed shards."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.server_process import refused, run
from shards import write_pairs

JOB: dict[str, Any] = {
    "stream": {
        "datasets": [{"name": "d"}],
        "seq_len": 256,
        "global_batch": 8,
        "sizing": {"max_patches": 256},
        "generation": {"ratio": "0.4", "query_tokens": 8},
    },
    "execution": {
        "modules": [
            {"name": "vit", "kind": "encoder"},
            {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2},
            {"name": "dit", "kind": "generator"},
        ],
        "policies": {"packing": "best_fit", "balance": "none", "order": "none"},
        "end": {"steps": 4},
    },
}


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pairs(tmp_path_factory.mktemp("simulate") / "d", 60, 16)
    assert run("index", folder).returncode == 0
    return folder


def line(folder: Path, job: dict[str, Any], *more: str | Path) -> tuple[str | Path, ...]:
    """The command, over a job that is written beside the shards."""
    file = folder.parent / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return "simulate", "--job", file, "--dataset", f"d={folder}", *more


def compared(folder: Path, job: dict[str, Any], *more: str) -> dict[str, Any]:
    done = run(*line(folder, job, "--json", *more))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_combination_of_policies_once(indexed: Path) -> None:
    rows = compared(indexed, JOB)["rows"]
    keys = [(r["packing"], r["balance"], r["order"], r["extra_in_flight"]) for r in rows]
    assert len(set(keys)) == len(keys) == 3 * 2 * 3 + 2
    assert {key[3] for key in keys[:18]} == {0}
    assert [key for key in keys if key[3]] == [("best_fit", "none", "none", extra) for extra in (1, 2)]
    assert [key for key, r in zip(keys, rows, strict=True) if r["own"]] == [("best_fit", "none", "none", 0)]


def test_figures_agree_with_the_plans_of_the_same_steps(indexed: Path) -> None:
    """The job's own row is the mean of what `dataserver plan` says of each step."""
    job = {**JOB, "execution": {**JOB["execution"], "policies": {}}}
    own = next(r for r in compared(indexed, job, "--first-step", "1", "--steps", "2")["rows"] if r["own"])
    plans = []
    for step in (1, 2):
        _, *rest = line(indexed, job, "--step", str(step), "--json")
        plans.append(json.loads(run("plan", *rest).stdout))
    makespans = [int(plan["makespan_after_ns"]) for plan in plans]
    assert own["step_ns"] == sum(makespans) // 2
    assert own["lower_bound_ns"] == sum(int(plan["lower_bound_ns"]) for plan in plans) // 2
    assert own["bubble_percent"] == pytest.approx(sum(plan["bubble_after_ppm"] for plan in plans) / 2e4)
    for module, load in enumerate(plans[0]["loads"]):
        times = [[int(ns) for ns in plan["loads"][module]["after_ns"]] for plan in plans]
        expected = sum(max(ns) * len(ns) / sum(ns) for ns in times) / 2
        assert own["imbalance"][load["module"]] == pytest.approx(expected)


def test_what_must_hold_of_any_comparison(indexed: Path) -> None:
    found = compared(indexed, JOB)
    rows = found["rows"]
    by_key = {(r["packing"], r["balance"], r["order"]): r for r in rows if not r["extra_in_flight"]}
    for (packing, balance, order), row in by_key.items():
        assert row["step_ns"] >= row["lower_bound_ns"] > 0
        assert 0 < row["fill_percent"] <= 100
        assert 0 <= row["empty_sequences_percent"] < 100
        assert 0 < row["bubble_percent"] < 100
        assert min(row["imbalance"].values()) >= 1
        assert row["planning_ns"] > 0
        if balance == "lpt":  # unbalanced is among the candidates
            assert row["step_ns"] <= by_key[packing, "none", "none"]["step_ns"], order
    baseline = by_key["best_fit", "none", "none"]
    assert baseline["slower_than_own_percent"] == 0
    assert by_key["balanced", "lpt", "search"]["slower_than_own_percent"] < 0
    slots = 2 * found["steps"] * baseline["microbatches"]
    held = slots * (1 - baseline["empty_sequences_percent"] / 100) * 256 * baseline["fill_percent"] / 100
    assert found["tokens"] == pytest.approx(held, rel=0.05)  # exactly so in one step; these are means over steps


def test_one_step_accounts_for_every_token(indexed: Path) -> None:
    found = compared(indexed, JOB, "--steps", "1")
    for row in found["rows"]:
        slots = 2 * row["microbatches"]
        held = slots * (1 - row["empty_sequences_percent"] / 100) * 256 * row["fill_percent"] / 100
        assert found["tokens"] == pytest.approx(held)


def test_only_planning_time_differs_between_two_runs(indexed: Path) -> None:
    first, second = (compared(indexed, JOB, "--steps", "1") for _ in range(2))
    for found in (first, second):
        for row in found["rows"]:
            del row["planning_ns"]
    assert first == second


def test_a_job_that_packs_nothing_has_no_choice_of_packing(indexed: Path) -> None:
    job = {**JOB, "stream": {**JOB["stream"], "packing": {"enabled": False}}}
    rows = compared(indexed, job, "--steps", "1")["rows"]
    assert len(rows) == 2 * 3 + 2
    shown = run(*line(indexed, job, "--steps", "1")).stdout
    assert "lpt, search" in shown
    assert "best_fit" not in shown


def test_the_table_marks_the_job_and_names_what_is_faster(indexed: Path) -> None:
    done = run(*line(indexed, JOB, "--steps", "2"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "steps 0 to 1 of 4" in lines[1]
    assert [row.split()[:4] for row in lines[8:] if " * " in row] == [["best_fit,", "none,", "none", "*"]]
    assert sum("extra_in_flight" in row for row in lines) == 2
    rows = [row for row in lines[:-1] if "balanced, " in row or "_fit, " in row]
    times = [float(row.replace("*", "").split()[3]) for row in rows]
    assert len(times) == 18
    assert times == sorted(times)
    assert "policies: {packing: " in lines[-1]


def test_a_job_that_has_the_best_policies_is_told_so(indexed: Path) -> None:
    policies = run(*line(indexed, JOB)).stdout.splitlines()[-1].partition("policies: ")[2]
    best = {**JOB, "execution": {**JOB["execution"], "policies": yaml.safe_load(policies)}}
    assert "the job's own policies are the fastest" in run(*line(indexed, best)).stdout


def test_steps_end_where_the_job_ends(indexed: Path) -> None:
    found = compared(indexed, JOB, "--first-step", "3")
    assert (found["first_step"], found["steps"], found["steps_of_job"]) == (3, 1, 4)


def test_refusals(indexed: Path) -> None:
    assert "ends after step 3" in refused(*line(indexed, JOB, "--first-step", "4"))
    assert "--steps is 0" in refused(*line(indexed, JOB, "--steps", "0"))
    assert "--first-step is -1" in refused(*line(indexed, JOB, "--first-step=-1"))
    assert "'d'" in refused("simulate", "--job", line(indexed, JOB)[2], "--dataset", f"other={indexed}")
    assert "cannot be read" in refused("simulate", "--job", indexed / "no.yaml", "--dataset", f"d={indexed}")


def test_help() -> None:
    assert "--first-step" in run("simulate", "--help").stdout
