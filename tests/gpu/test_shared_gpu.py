"""Processes that share a GPU: what is told of those that fail or hang. Needs none."""

import sys
from pathlib import Path

import pytest
from gpu.shared_gpu import run_all

HANGS = """
import os, sys, time

def waits_for_a_message():
    time.sleep(600)

sys.stderr.write(f"rank {os.environ['RANK']} runs\\n")
sys.stderr.flush()
if os.environ["RANK"] == "1":
    waits_for_a_message()
"""


def places(number: int) -> list[dict[str, str]]:
    return [{"RANK": str(rank)} for rank in range(number)]


def test_processes_that_end_well_tell_nothing(tmp_path: Path) -> None:
    run_all([sys.executable, "-c", "pass"], places(2), tmp_path, 60)


def test_of_one_that_hangs_the_stacks_are_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as told:
        run_all([sys.executable, "-c", HANGS], places(2), tmp_path, 3)
    found = str(told.value)
    assert "rank-0.log: exit code 0" in found
    assert "rank-1.log: hangs" in found
    assert "in waits_for_a_message" in found


def test_of_one_that_fails_the_end_of_its_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank-0\.log: exit code 1"):
        run_all([sys.executable, "-c", "raise SystemExit('no GPU')"], places(1), tmp_path, 60)
