"""The benchmark of serving: what it says of rivals that are there, and of those that are not."""

from pathlib import Path

import bench_serving
import pytest
from bench_serving import CONTENDERS, ENCODER, Measured, Started
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
