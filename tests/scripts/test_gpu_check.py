"""What `scripts/gpu_check` is made of: bounded processes, traces, variants, wheels; and all of it in small on a CPU."""

import gzip
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from inspect import signature
from pathlib import Path

import psutil
import pytest
from on_gpu import pipelines
from on_gpu.cases import Cases
from on_gpu.processes import Ended, run_bounded
from on_gpu.record import Record
from on_gpu.telling import Given, Told
from on_gpu.traces import read, summary
from on_gpu.variants import VARIANTS, variant
from on_gpu.watched import StepWatch
from on_gpu.wheels import WheelError, install

from trainclient.training.profiling import StepProfiler

SCRIPTS = Path(__file__).parents[2] / "scripts"
FORKS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_command_that_hangs_is_ended_with_processes_of_other_sessions(tmp_path: Path) -> None:
    ended = run_bounded([sys.executable, "-c", FORKS], 3, tmp_path / "log", {})
    assert ended.code is None
    assert "after its" in ended.how
    child = int(ended.log.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_fails_says_how(tmp_path: Path) -> None:
    ended = run_bounded([sys.executable, "-c", "import sys; print('why'); sys.exit(3)"], 60, tmp_path / "log", {})
    assert (ended.code, ended.how, ended.tail(5)) == (3, "exit code 3", "why")


def event(name: str, category: str, begin: float, length: float, correlation: int | None = None) -> dict[str, object]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": length, "pid": 1, "tid": 1, "args": args}


def test_a_trace_tells_kernels_gaps_and_waits_by_operation(tmp_path: Path) -> None:
    events = [
        event("forward of microbatch 0 of step 1", "user_annotation", 0, 100),
        event("aten::mm", "cpu_op", 10, 20),
        event("cudaLaunchKernel", "cuda_runtime", 15, 5, 1),
        event("nvjet_gemm", "kernel", 30, 40, 1),
        event("cudaLaunchKernel", "cuda_runtime", 40, 5, 2),
        event("flash_fwd_kernel", "kernel", 60, 30, 2),
        event("cudaStreamSynchronize", "cuda_runtime", 50, 40, 3),
        event("backward of microbatch 0 of step 1", "user_annotation", 100, 100),
        event("cuLaunchKernelEx", "cuda_driver", 110, 5, 4),
        event("nvjet_gemm", "kernel", 150, 50, 4),
        {"ph": "i", "name": "marker", "ts": 3},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = summary(read(path))
    assert found["window_ms"] == pytest.approx(0.2)
    assert found["busy_percent"] == pytest.approx(100 * (60 + 50) / 200)
    assert (found["kernels"], found["launches"], found["host_operations"]) == (3, 3, 1)
    assert [(k["name"], k["count"]) for k in found["by_kind"]] == [("matrix products", 2), ("attention", 1)]
    assert found["by_name"][0]["name"] == "nvjet_gemm"
    assert [round(g["ms"], 6) for g in found["largest_gaps"]] == [0.06, 0.03]
    assert found["largest_gaps"][0]["in"][0].startswith("backward of microbatch 0")
    assert [(w["name"], w["in"]) for w in found["longest_waits"]] == [
        ("cudaStreamSynchronize", "forward of microbatch 0 of step 1")
    ]
    forward, backward = found["by_operation"]
    assert (forward["kernels"], forward["waits"], backward["kernels"]) == (2, 1, 1)
    assert forward["device_ms"] == pytest.approx(0.07)


def test_a_trace_without_a_device_tells_operations(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("aten::mm", "cpu_op", 10, 20)]}))
    found = summary(read(path))
    assert (found["kernels"], found["operations"][0]["name"]) == (0, "aten::mm")


def test_variants_are_joined() -> None:
    joined = variant("recomputed+fixed+quads")
    assert joined.recomputed == ("vision",)
    assert joined.whole
    assert joined.environment == VARIANTS["fixed"].environment
    assert joined.microbatch == variant("quads+fixed").microbatch == 4
    with pytest.raises(ValueError, match="there is no variant 'faster'"):
        variant("base+faster")


def test_every_variant_is_in_the_queue() -> None:
    queue = (SCRIPTS.parent / "docs" / "internal" / "benchmarks" / "README.md").read_text()
    assert [name for name in VARIANTS if f"| `{name}` |" not in queue] == []


def test_wheels_that_are_not_there_are_said(tmp_path: Path) -> None:
    with pytest.raises(WheelError, match=r"there are no wheels in .*make some with"):
        install(tmp_path, tmp_path / "site")


def test_what_a_stage_found_is_read_again(tmp_path: Path) -> None:
    told = Told.read(tmp_path / "stage.json")
    told.table("Figures", "what", "found").rows.append(["a | b", "1\n2"])
    told.data["x"] = 1
    told.save()
    found = Told.read(tmp_path / "stage.json")
    assert found.data == {"x": 1}
    assert found.tables[0].markdown().splitlines()[2:] == ["| what | found |", "| --- | --- |", "| a / b | 1<br>2 |"]


def test_a_stage_that_was_ended_is_in_the_record_with_what_it_had_found(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    log = work / "training.log"
    log.write_text("step 1\nstep 2\n")
    told = Told(work / "training.json")
    told.table("Variants", "variant").rows.append(["base"])
    record = Record(tmp_path, work, {"device": "CPU"}, small=True)
    record.add("training", "Utilisation", Ended(None, 12.0, log), told)
    record.skipped("rivals", "Rivals", "no time was left")
    text = record.path.read_text()
    for part in ("`training`: ended after its 12 s", "| base |", "step 2", "`rivals`: not run, no time was left"):
        assert part in text
    assert "step 1" in gzip.decompress(record.path.with_suffix(".logs.gz").read_bytes()).decode()


@pytest.mark.parametrize(
    ("works", "tried"), [("MPS", 1), ("MPS, rows through hosts in all steps", 2), ("processes take turns", 3), ("", 3)]
)
def test_pipelines_are_tried_in_ways_until_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: str, tried: int
) -> None:
    """The others then run in that way."""
    ran: list[tuple[tuple[str, ...], dict[str, str]]] = []
    ways = {"MPS": {"MPS": "1"}, "MPS, rows through hosts in all steps": {"MPS": "1", **pipelines.BY_HOST}}
    expected = ways.get(works, {})

    def run_cases(tests: tuple[str, ...], limit_s: float, log: Path, given: dict[str, str], at_once: int = 1) -> Cases:
        log.write_text("")
        ran.append((tests, {name: value for name, value in given.items() if name != "DISTTRAIN_CASE_S"}))
        passes = bool(works) and ran[-1][1] == expected
        found = ({"test": t, "outcome": "passed" if passes else "failed", "seconds": 1.0, "said": ""} for t in tests)
        return Cases(tuple(found), Ended(0 if passes else 1, 1.0, log))

    monkeypatch.setattr(pipelines, "run_cases", run_cases)
    monkeypatch.setattr(pipelines, "mps", lambda: nullcontext(({"MPS": "1"}, "at the same time")))
    pipelines.pipelines(Given(tmp_path, False, 200, ()))
    assert [tests for tests, _ in ran] == [(pipelines.FIRST,)] * tried + [pipelines.OTHERS]
    assert ran[-1][1] == ran[-2][1] == expected
    told = Told.read(tmp_path / "pipelines.json")
    assert len(told.tables[0].rows) == tried + len(pipelines.OTHERS)


def check(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "on_gpu", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)


@pytest.mark.parametrize("given", [("--stages", "units,faster"), ("--variants", "base,faster")])
def test_an_unknown_name_is_refused(tmp_path: Path, given: tuple[str, str]) -> None:
    ran = check(*given, "--output", tmp_path)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"gpu_check: there is no {given[0][2:-1]} 'faster'; use ")


def test_what_watches_steps_is_made_as_the_trainer_makes_its_profiler() -> None:
    assert signature(StepWatch) == signature(StepProfiler)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_it_runs_in_small_on_a_cpu(tmp_path: Path) -> None:
    ran = check("--small", "--output", tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {path.name.partition(".")[2] for path in tmp_path.iterdir()} == {"json", "logs.gz", "md", "trace.json.gz"}
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())["stages"]
    assert {stage["ended"] for stage in found.values()} == {"done"}
    base = found["training"]["variants"]["base"]
    assert [m["step"] for m in base["steps"]] == [1, 2]
    assert [n["before_step"] for n in base["noted"]] == [1, 2, 3]
    assert found["training"]["profile"]["host_operations"] > 1000
    assert found["training"]["syncs"] == {}
    assert found["planned"]["ratio"] > 0
    assert found["rivals"]["transformers_seconds"]
