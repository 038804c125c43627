"""Training with traces, as users start it: the steps that were asked for, with the waits of all ranks."""

from collections import Counter
from pathlib import Path

import pytest
from cli.server_process import serving
from program.runtime_cases import Degrees, job_data
from serving.harness import index
from shards import write_pairs
from tracing.collector import collecting
from training.runs import Run

DEGREES = Degrees(1, 1, 1, 1)
STEPS = 4


@pytest.mark.long
def test_a_training_run_is_traced(tmp_path: Path) -> None:
    names = [dataset["name"] for dataset in job_data(DEGREES)["stream"]["datasets"]]
    folders = [index(write_pairs(tmp_path / name, 24, 8, seed=n)) for n, name in enumerate(names)]
    datasets = [flag for name, folder in zip(names, folders, strict=True) for flag in ("--dataset", f"{name}={folder}")]
    with collecting() as collector, serving(*datasets, "--otlp-endpoint", collector.url) as server:
        traces = ("--otlp-endpoint", collector.url, "--trace-every", "2")
        status, errors = Run(server.address, tmp_path / "run").train(DEGREES, "--steps", str(STEPS), *traces)
        assert status == 0, errors
        assert server.end()[0] == 0
    waits = [one for one in collector.spans if one.name == "wait"]
    steps = Counter(one.attributes["disttrain.step"] for one in waits)
    assert steps[0] > 0
    assert steps[2] > 0
    assert all(step % 2 == 0 for step in steps)
    modules = {module["name"] for module in job_data(DEGREES)["execution"]["modules"]}
    assert {one.attributes["disttrain.module"] for one in waits if one.attributes["disttrain.step"] == 0} == modules
    taken = {one.trace for one in waits}  # servers worked ahead of where training stopped
    decoded = {collector.path(one)[:2] for one in collector.spans if one.name == "decode" and one.trace in taken}
    assert decoded == {("step", "wait")}
