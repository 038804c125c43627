"""Traces of torch's profiler that are whole, or not there."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults.disk import missing, small_disk

from trainclient.training.config import ProfileConfig
from trainclient.training.profiling import StepProfiler, trace_path


def profiled(folder: Path) -> None:
    """Profile a step of one process."""
    groups: Any = SimpleNamespace(device=torch.device("cpu"), rank=0)
    with StepProfiler(ProfileConfig(directory=folder, first=0), groups) as profiler:
        profiler.begin_step(0)
        for _ in range(200):
            torch.ones(2, 2) @ torch.ones(2, 2)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_full_disk_leaves_the_trace_that_was_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Torch writes as much as there is room for, and says nothing."""
    profiled(tmp_path)
    assert json.loads(trace_path(tmp_path, 0).read_text())["traceEvents"]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-00000.json"]
    with small_disk(tmp_path / "disk", kibibytes=16) as disk:
        trace_path(disk, 0).write_text("precious")
        profiled(disk)
        assert [(path.name, path.read_text()) for path in disk.iterdir()] == [("rank-00000.json", "precious")]
    said = f"the profile {trace_path(tmp_path / 'disk', 0)} is not written: No space left on device"
    assert said in capfd.readouterr().err.splitlines()
