"""The planner's benchmark reads its data where it is told to."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from planning_rows import flexsp

BENCH = Path(__file__).parents[2] / "scripts" / "bench_planning.py"


def test_lengths_are_read_from_the_folder_that_is_named(tmp_path: Path) -> None:
    """Not from a folder that is built in: where these are too few for the batches of the paper, that is an error."""
    ran = subprocess.run(
        [sys.executable, BENCH, "--only", "flexsp", "--data", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 1
    assert "missing" in ran.stdout
    (tmp_path / "flexsp").mkdir()
    np.save(tmp_path / "flexsp" / "wikipedia_lengths.npy", np.full(3, 1_000))
    assert [len(b) for b in flexsp.batches(tmp_path / "flexsp", "7b-192k")][:2] == [3, 0]
