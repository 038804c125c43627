"""`dataserver fit`: from step times, in a file or a server, to the cost of the next job."""

import copy
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cli.server_process import refused, run
from disttrain.v1 import data_service_pb2 as pb
from google.protobuf.json_format import MessageToJson
from serving.harness import index, running
from shards import write_pairs

from dataserver.cli import fit
from dataserver.jobs import Catalog, JobPlanner, fill_job
from dataserver.planning.fitting.fitting import microbatch_sizes
from dataserver.planning.job.fields import Cost
from dataserver.planning.job.identity import parse_job
from dataserver.serving.config import load_config

JOB = {
    "stream": {
        "datasets": [{"name": "d"}],
        "seq_len": 512,
        "global_batch": 8,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": False},
    },
    "execution": {
        "modules": [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2}],
        "end": {"steps": 5},
    },
}
COSTS = {
    "vit": Cost(microbatch_ns=30_000, linear_ps=4_000_000, quadratic_fs=70_000_000, backward_percent=0),
    "llm": Cost(microbatch_ns=90_000, linear_ps=36_000_000, quadratic_fs=80_000_000, backward_percent=150),
}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("fit") / "d", 40, 16, seed=3))


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(JOB))
    return file


@pytest.fixture(scope="module")
def reports(dataset: Path) -> list[pb.StepTimes]:
    return reports_of(JOB, dataset)


def reports_of(data: dict[str, Any], dataset: Path) -> list[pb.StepTimes]:
    """What trainers that work exactly as `COSTS` says would report of all steps."""
    catalog = Catalog.open(load_config(None, {"datasets": {"d": dataset}}))
    job = parse_job(fill_job(data, catalog))
    planner = JobPlanner(job, catalog.find_datasets(job.stream))
    found = []
    for step in range(planner.num_steps):
        plan = planner.plan(step)
        for module in job.spec.execution.modules:
            cost = COSTS[module.name]
            _, total, squares = microbatch_sizes(plan, module)
            forward = cost.microbatch_ns + total * cost.linear_ps // 1_000 + squares * cost.quadratic_fs // 1_000_000
            for rank, times in enumerate(forward):
                first = times // 3 if module.pp == 2 else times  # stages need not take the same time
                for stage, part in enumerate((first, times - first)[: module.pp]):
                    backward = part * cost.backward_percent // 100
                    fields = {"job_id": job.job_id, "step": step, "module": module.name, "rank": rank, "stage": stage}
                    found.append(pb.StepTimes(**fields, forward_ns=part.tolist(), backward_ns=backward.tolist()))
    return found


def save(file: Path, reports: list[pb.StepTimes], **changes: Any) -> Path:
    """As the command's documentation says; `changes` go into the first report."""
    lines = [json.loads(MessageToJson(r, indent=None)) for r in reports]
    lines[0].update(changes)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def snippet(output: str) -> dict[str, Cost]:
    """The costs in the YAML of the command's output."""
    data = yaml.safe_load(output[output.index("# For the next job") :])
    return {m["name"]: Cost.model_validate(m["cost"]) for m in data["execution"]["modules"]}


def assert_near(found: dict[str, Cost], names: tuple[str, ...]) -> None:
    assert tuple(found) == names
    for name in names:
        for field in ("linear_ps", "quadratic_fs", "microbatch_ns"):
            assert getattr(found[name], field) == pytest.approx(getattr(COSTS[name], field), rel=1e-3)
        assert found[name].backward_percent == COSTS[name].backward_percent


def test_times_in_a_file(dataset: Path, job_file: Path, tmp_path: Path, reports: list[pb.StepTimes]) -> None:
    file = save(tmp_path / "times.jsonl", reports)
    line = ("fit", "--job", job_file, "--times", file, "--dataset", f"d={dataset}")
    found = run(*line)
    assert found.returncode == 0, found.stderr
    assert_near(snippet(found.stdout), ("vit", "llm"))
    assert "1.0000" in found.stdout
    assert run(*line).stdout == found.stdout
    later = run(*line, "--first-step", "2")
    assert_near(snippet(later.stdout), ("vit", "llm"))
    job = yaml.safe_load(job_file.read_text())
    for module in job["execution"]["modules"]:
        module["cost"] = snippet(found.stdout)[module["name"]].model_dump()
    job_file.write_text(yaml.safe_dump(job))
    assert run("plan", "--job", job_file, "--step", "0", "--dataset", f"d={dataset}").returncode == 0


def test_a_frozen_encoder_reports_no_backwards(dataset: Path, tmp_path: Path) -> None:
    data = copy.deepcopy(JOB)
    data["execution"]["modules"][0]["frozen"] = True
    found = reports_of(data, dataset)
    for report in found:
        if report.module == "vit":
            del report.backward_ns[:]
    file, job = save(tmp_path / "times.jsonl", found), tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(data))
    fitted = run("fit", "--job", job, "--times", file, "--dataset", f"d={dataset}")
    assert fitted.returncode == 0, fitted.stderr
    assert_near(snippet(fitted.stdout), ("vit", "llm"))


def test_times_of_a_server(dataset: Path, job_file: Path, reports: list[pb.StepTimes]) -> None:
    with running({"d": dataset}) as server:
        line = ("fit", "--job", job_file, "--server", server.address, "--dataset", f"d={dataset}")
        assert "does not know job" in refused(*line)
        assert server.create(JOB).job_id == reports[0].job_id
        assert "no step times" in refused(*line)
        for times in reports:
            server.stub.ReportStepTimes(pb.ReportStepTimesRequest(times=times), timeout=20)
        found = run(*line)
    assert found.returncode == 0, found.stderr
    assert_near(snippet(found.stdout), ("vit", "llm"))
    assert "lists no step times" in refused(*line), "the server is gone"


def test_the_documented_line_saves_what_a_server_holds(
    dataset: Path, job_file: Path, tmp_path: Path, reports: list[pb.StepTimes]
) -> None:
    script = textwrap.dedent((fit.__doc__ or "").split("\n\n")[2]).strip()
    assert script.startswith("python -c '")
    with running({"d": dataset}) as server:
        job_id = server.create(JOB).job_id
        for times in reports:
            server.stub.ReportStepTimes(pb.ReportStepTimesRequest(times=times), timeout=20)
        script = script.replace("python", sys.executable, 1).replace("HOST:PORT", server.address)
        subprocess.run(
            ["bash", "-c", script.replace("JOB_ID", job_id)], cwd=tmp_path, timeout=60, check=True, capture_output=True
        )
    found = run("fit", "--job", job_file, "--times", tmp_path / "times.jsonl", "--dataset", f"d={dataset}")
    assert_near(snippet(found.stdout), ("vit", "llm"))


def test_a_later_report_replaces_an_earlier_one_and_incomplete_ranks_are_left_out(
    dataset: Path, job_file: Path, tmp_path: Path, reports: list[pb.StepTimes]
) -> None:
    wrong = pb.StepTimes()
    wrong.CopyFrom(reports[0])
    wrong.forward_ns[:] = [ns * 100 for ns in wrong.forward_ns]
    half = [r for r in reports if not (r.module == "llm" and r.step == 1 and r.rank == 1 and r.stage == 0)]
    file = save(tmp_path / "times.jsonl", [wrong, *half])
    found = run("fit", "--job", job_file, "--times", file, "--dataset", f"d={dataset}")
    assert_near(snippet(found.stdout), ("vit", "llm"))


def test_disturbed_microbatches_are_left_out_and_counted(
    dataset: Path, job_file: Path, tmp_path: Path, reports: list[pb.StepTimes]
) -> None:
    """Every fifth microbatch took much longer: the coefficients stay where they are."""
    slowed = [pb.StepTimes.FromString(r.SerializeToString()) for r in reports]
    for report in slowed:
        for k in range(len(report.forward_ns)):
            if (report.step + k + report.rank) % 5 == 0:
                report.forward_ns[k] += 10**8 * (k + 1)
    line = ("fit", "--job", job_file, "--times", save(tmp_path / "t", slowed), "--dataset", f"d={dataset}")
    found = run(*line)
    assert found.returncode == 0, found.stderr
    assert_near(snippet(found.stdout), ("vit", "llm"))
    table = [line.split() for line in found.stdout.splitlines()]
    assert [[r[1], r[2]] for r in table if r[:1] in (["vit"], ["llm"])] == [["16", "4"], ["32", "8"]]


def test_modules_that_cannot_be_fitted_are_named_after_the_others(
    dataset: Path, job_file: Path, tmp_path: Path, reports: list[pb.StepTimes]
) -> None:
    one_stage = [r for r in reports if r.module == "vit" or r.stage == 0]
    line = ("fit", "--job", job_file, "--times", save(tmp_path / "t", one_stage), "--dataset", f"d={dataset}")
    found = run(*line)
    assert_near(snippet(found.stdout), ("vit",))
    assert "module llm: no step was reported by all 2 stages of a rank" in found.refusal()
    flat = pb.StepTimes.FromString(reports[0].SerializeToString())
    flat.forward_ns[:] = [0] * len(flat.forward_ns)
    nothing = run("fit", "--job", job_file, "--times", save(tmp_path / "t", [flat]), "--dataset", f"d={dataset}")
    assert "module vit: no microbatch took any time" in nothing.refusal()
    assert "For the next job" not in nothing.stdout


def test_images_of_one_size_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    """Pictures that have no more than one block of patches each."""
    folder = index(write_pairs(tmp_path / "d", 16, 16, seed=3))
    job = {**JOB, "stream": {**JOB["stream"], "sizing": {"max_patches": 4}}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    catalog = Catalog.open(load_config(None, {"datasets": {"d": folder}}))
    parsed = parse_job(fill_job(job, catalog))
    plan = JobPlanner(parsed, catalog.find_datasets(parsed.stream)).plan(0)
    assert set(plan.samples.patches.tolist()) == {4}
    times = [100 * (k + 1) for k in range(plan.num_microbatches)]
    fields = {"job_id": parsed.job_id, "module": "vit", "forward_ns": times, "backward_ns": times}
    line = save(tmp_path / "t", [pb.StepTimes(**fields)])
    message = refused("fit", "--job", file, "--times", line, "--dataset", f"d={folder}")
    assert "linear_ps cannot be told from quadratic_fs: all items have about 4 patches or tokens" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jobId": "0" * 64}, "found times of job '0000"),
        ({"jobId": ""}, "found times of job ''"),
        ({"module": "audio"}, "module 'audio' is not in the job"),
        ({"step": "5"}, "found times of step 5 of module vit; it has 5"),
        ({"rank": 1}, "found times of rank 1 of module vit; it has 1"),
        ({"stage": 4294967295}, "found times of stage 4294967295 of module vit; it has 1"),
        ({"forwardNs": []}, "stage 0 reported 0 forward times of step 0; one for each of its 4 microbatches"),
        ({"backwardNs": ["1"] * 3}, "reported 3 backward times"),
        ({"forwardNs": ["-1"] * 4}, "is not between 0 and 1000000000000000 ns"),
        ({"forwardNs": [str(2**63 - 1)] * 4}, "is not between 0 and"),
        ({"forwardNs": ["soon"]}, "t, line 1: no StepTimes in JSON"),
        ({"colour": "red"}, "t, line 1: no StepTimes in JSON"),
    ],
)
def test_reports_that_do_not_fit_the_job(
    dataset: Path,
    job_file: Path,
    tmp_path: Path,
    reports: list[pb.StepTimes],
    changes: dict[str, Any],
    message: str,
) -> None:
    file = save(tmp_path / "t", reports, **changes)
    assert message in refused("fit", "--job", job_file, "--times", file, "--dataset", f"d={dataset}")


def test_ranks_that_share_sequences_compute_a_part_of_them(dataset: Path, tmp_path: Path) -> None:
    encoder, backbone = JOB["execution"]["modules"]
    groups = {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 10**6}]}
    shared = {**backbone, "pp": 1, "memory": {"budget_bytes": 200, "unit_bytes": 1}}
    shared["cost"] = {"microbatch_ns": 0, "linear_ps": 36_000_000, "quadratic_fs": 80_000_000}  # many microbatches
    data = {**JOB, "execution": {**JOB["execution"], "modules": [encoder, shared], "layout": groups}}
    reports, degrees = [r for r in reports_of(data, dataset) if r.module == "vit"], set()
    catalog, cost = Catalog.open(load_config(None, {"datasets": {"d": dataset}})), COSTS["llm"]
    job = parse_job(fill_job(data, catalog))
    planner = JobPlanner(job, catalog.find_datasets(job.stream))
    for step in range(planner.num_steps):
        plan = planner.plan(step)
        arrangement, forward = plan.arrangement("llm"), np.zeros((backbone["dp"], plan.num_microbatches), np.int64)
        groups = plan.groups
        for microbatch, first, degree in zip(groups.microbatch, groups.first_rank, groups.degree, strict=True):
            degrees.add(int(degree))
            tokens = plan.samples.tokens[arrangement.item[arrangement.of(first, microbatch)]]
            work = tokens.sum() * cost.linear_ps / 1e3 + (tokens**2).sum() * cost.quadratic_fs / 1e6
            forward[first : first + degree, microbatch] = cost.microbatch_ns + work / degree
        for rank, times in enumerate(forward):
            fields = {"job_id": job.job_id, "step": step, "module": "llm", "rank": rank}
            backward = times * cost.backward_percent // 100
            reports.append(pb.StepTimes(**fields, forward_ns=times.tolist(), backward_ns=backward.tolist()))
    assert degrees == {1, 2}
    file, times = tmp_path / "job.yaml", save(tmp_path / "t", reports)
    file.write_text(yaml.safe_dump(data))
    found = run("fit", "--job", file, "--times", times, "--dataset", f"d={dataset}")
    assert found.returncode == 0, found.stderr
    assert_near(snippet(found.stdout), ("vit", "llm"))


def test_files_that_are_no_times(dataset: Path, job_file: Path, tmp_path: Path) -> None:
    file, base = tmp_path / "t", ("fit", "--job", job_file, "--dataset", f"d={dataset}")
    assert "exactly one of --times and --server" in refused(*base)
    assert "exactly one of --times and --server" in refused(*base, "--times", file, "--server", "127.0.0.1:1")
    assert "cannot be read" in refused(*base, "--times", file)
    for content, message in (
        (b"", "there are no step times"),
        (b"\n \n", "there are no step times"),
        (b"{}\n[1]\n", "t, line 2: no StepTimes in JSON"),
        (b"\xff\xfe\n", "t, line 1: no StepTimes in JSON"),
        (b'{"stepTime":' + b"[" * 100_000, "t, line 1: no StepTimes in JSON"),
        (b" " * (5 << 20), "t, line 1: at most"),
    ):
        file.write_bytes(content)
        assert message in refused(*base, "--times", file)
    assert "usage: dataserver fit" in run("fit", "--help").stdout


def test_sizes_differ_enough(reports: list[pb.StepTimes]) -> None:
    """Otherwise the tests above would be refused."""
    assert len(np.unique([ns for r in reports for ns in r.forward_ns])) > 20
