"""The benchmark of serving: what it says of rivals that are there, and of those that are not."""

import sys
from pathlib import Path

import bench_serving
import pytest
from bench_serving import CONTENDERS, ENCODER, SENT, SENT_ALONE, SERIAL_ALONE, Contender, Measured, Started
from benchmarks.rows import Row
from loaders import installing


def measured(cpu_ms: float) -> Measured:
    return Measured(cpu_ms, consumer_cpu_ms=0.1, images_per_s=1000 / cpu_ms, consumer_mb=200, others_mb=400, first_s=1)


def test_rivals_that_are_not_installed_are_named_and_judged_by_nobody() -> None:
    there = [c for c in CONTENDERS if c.environment is None]
    rows = list(bench_serving.rows({c.name: [measured(1.0)] * 3 for c in there}))
    missing = {c.name for c in CONTENDERS} - {c.name for c in there}
    assert {row.name for row in rows if row.measured.startswith("not installed")} == missing
    assert len(missing) == 4
    assert all(row.reached is None for row in rows if row.name in missing)


def test_a_ratio_is_the_median_of_those_within_a_round() -> None:
    found = {c.name: [measured(ms) for ms in (1.0, 2.0, 4.0)] for c in CONTENDERS}
    found[ENCODER] = [measured(ms) for ms in (1.2, 2.2, 5.2)]  # 1.2, 1.1 and 1.3 times the floor
    row = next(row for row in bench_serving.rows(found) if row.name == ENCODER)
    assert row.measured.startswith("1.20 x the floor")
    assert row.reached is False


def test_what_is_sent_gains_from_cores_by_its_own_runs() -> None:
    found = {c.name: [measured(1.0)] for c in CONTENDERS}
    found |= {SENT_ALONE: [measured(1.8)], SERIAL_ALONE: [measured(2.0)]}
    made = {row.name: row for row in bench_serving.rows(found)}
    shared, sent = (made[f"{name}: one core to all, over what serial loops gain"] for name in (ENCODER, SENT))
    assert (shared.measured, shared.reached) == ("0.50 x", False)
    assert (sent.measured, sent.reached) == ("0.90 x", False)


def test_a_run_that_is_cut_has_printed_the_table_of_the_rounds_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def run(contender: Contender, _shards: Path, _count: int) -> Measured:
        seen.append(contender.name)
        if seen.count(contender.name) == 2:
            raise KeyboardInterrupt
        return measured(1.0)

    monkeypatch.setattr(sys, "argv", ["bench_serving.py", "--rounds", "2"])
    for name, replacement in {
        "run": run,
        "start": lambda *_: Started(0.5, 0.9, 0.8),
        "import_cpu_s": lambda _: 1.0,
        "tiny_row": lambda _: Row("tiny", "4,180", "", None),
        "prepare": lambda *_: None,
    }.items():
        monkeypatch.setattr(bench_serving, name, replacement)
    monkeypatch.setattr(bench_serving.subprocess, "run", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        bench_serving.main()
    printed = capsys.readouterr().out
    assert "after 1 of 2 rounds" in printed
    assert f"{ENCODER} " in printed
    assert "4,180" in printed


def test_a_warm_start_is_judged_and_a_cold_one_told() -> None:
    cold = Started(20, 21, 30)
    warm, told = bench_serving.rows_of_starts([Started(0.5, first, 0.8) for first in (0.9, 0.8, 3.0)], cold)
    assert (warm.reached, told.reached) == (True, None)
    assert warm.measured.startswith("0.90 s")
    assert told.measured.startswith("21.0 s")


def test_the_import_of_a_server_is_judged_by_the_median_of_pairs() -> None:
    row = bench_serving.row_of_imports([(3.0, 2.0), (9.0, 3.0), (5.0, 2.0)])
    assert (row.measured, row.reached) == ("2.50 x", False)


def test_an_environment_counts_once_it_is_complete_and_as_it_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing, "FOLDER", tmp_path)
    monkeypatch.setattr(installing, "ENVIRONMENTS", {"small": ((),)})
    assert installing.python_of("small") is None
    monkeypatch.setattr(installing.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 1}))
    (tmp_path / "small").mkdir()
    with pytest.raises(SystemExit, match=r"small could not be installed; see .*install\.log"):
        installing.install("small")
    assert installing.python_of("small") is None
    monkeypatch.setattr(installing.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 0}))
    installing.install("small")
    assert installing.python_of("small") == tmp_path / "small" / "bin" / "python"
    monkeypatch.setattr(installing, "ENVIRONMENTS", {"small": (("numpy==1",),)})
    assert installing.python_of("small") is None
