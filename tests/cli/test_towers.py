"""`dataserver towers`, and `dataserver fit` for towers, on real indexed shards."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.server_process import refused, run
from disttrain.v1 import data_service_pb2 as pb
from google.protobuf.json_format import MessageToJson
from serving.harness import index
from shards import write_pairs

from dataserver.jobs import Catalog, JobPlanner, fill_job
from dataserver.planning.fitting.fitting import microbatch_sizes
from dataserver.planning.job.fields import Cost
from dataserver.planning.job.identity import parse_job
from dataserver.serving.config import load_config

COSTS = {
    "image": Cost(microbatch_ns=30_000, linear_ps=4_000_000, quadratic_fs=70_000_000, backward_percent=200),
    "text": Cost(microbatch_ns=90_000, linear_ps=1_000_000, quadratic_fs=8_000_000, backward_percent=150),
}
JOB: dict[str, Any] = {
    "stream": {
        "datasets": [{"name": "d"}],
        "seq_len": 77,
        "sizing": {"max_patches": 256},
        "global_batch": 48,
        "contrastive_batch": 24,
        "packing": {"enabled": False},
    },
    "execution": {
        "modules": [
            {"name": "image", "kind": "tower", "modality": "image", "dp": 2, "memory": {"budget_bytes": 10**9,
             "unit_bytes": 100_000}, "cost": COSTS["image"].model_dump()},
            {"name": "text", "kind": "tower", "modality": "text", "dp": 2, "tp": 2, "cost": COSTS["text"].model_dump()},
        ],
        "layout": {"kind": "contrastive", "microbatches": 2},
        "end": {"steps": 4},
    },
}  # fmt: skip
CLUSTER = ("--devices", "8", "--devices-per-node", "4", "--device-bytes", "1000000000")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("towers") / "d", 96, 16, seed=3))


def line(folder: Path, *more: str, job: dict[str, Any] = JOB, command: str = "towers") -> list[str | Path]:
    """The command, over a job that is written beside the shards."""
    file = folder.parent / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return [command, "--job", file, "--dataset", f"d={folder}", *more]


def with_modules(modules: list[dict[str, Any]]) -> dict[str, Any]:
    return {**JOB, "execution": {**JOB["execution"], "modules": modules}}


def test_degrees_are_chosen(folder: Path) -> None:
    """The heavy tower gets more replicas than the light one, whose replicas then have more samples each."""
    done = run(*line(folder, *CLUSTER, "--state-bytes", "image=2000000", "--steps", "3", "--json"))
    found = json.loads(done.stdout)
    assert (found["contrastive_batch"], found["steps"], found["samples"]) == (24, 3, 144)
    assert found["not_counted"] == {"states": ["text"], "activations": ["text"]}
    assert found["mean_sizes"]["image"] > found["mean_sizes"]["text"] > 2
    for name, placement in found["placements"].items():
        for tower in placement["towers"]:
            assert tower["batch"] * tower["replicas"] == 24
            assert tower["batch"] % 2 == 0, "two microbatches"
            assert tower["device_bytes"] <= 10**9
        used = [tower["devices"] for tower in placement["towers"]]
        assert max(used) <= 8 if name == "shared" else sum(used) <= 8
    image, text = found["placements"]["parallel"]["towers"]
    assert image["replicas"] > text["replicas"]
    equal = found["placements"]["equal"]
    assert len({(t["tp"], t["replicas"]) for t in equal["towers"]}) == 1
    assert found["placements"]["parallel"]["batch_ns"] < equal["batch_ns"]
    assert found["placements"]["parallel"]["simulated_step_ns"] < equal["simulated_step_ns"]
    assert found["placements"]["shared"]["simulated_step_ns"] is None
    assert found["fastest"] in ("parallel", "shared")


def test_what_is_printed_can_be_pasted(folder: Path) -> None:
    """The job with these modules is planned as it was simulated, its costs those of the new degrees."""
    options = (*CLUSTER, "--state-bytes", "image=2000000", "--state-bytes", "text=600000000", "--steps", "1")
    done = run(*line(folder, *options))
    assert done.returncode == 0, done.stderr
    for text in ("parallel", "shared", "equal", "times as fast as equal, as simulated", "activations of text"):
        assert text in done.stdout
    assert "states of" not in done.stdout
    modules = yaml.safe_load(done.stdout[done.stdout.index("# The towers") :])["execution"]["modules"]
    found = json.loads(run(*line(folder, *options, "--json")).stdout)
    assert modules == found["modules"]
    image, text = modules
    chosen = {tower["name"]: tower for tower in found["placements"]["parallel"]["towers"]}
    assert [module.get("dp", 1) for module in modules] == [chosen[m["name"]]["replicas"] for m in modules]
    assert image["memory"]["budget_bytes"] == 10**9 - 2_000_000 // chosen["image"]["tp"]
    assert text["cost"]["linear_ps"] * text.get("tp", 1) == 2 * COSTS["text"].linear_ps
    planned = run(*line(folder, "--step", "0", "--json", job=with_modules(modules), command="plan"))
    assert planned.returncode == 0, planned.stderr
    assert int(json.loads(planned.stdout)["makespan_after_ns"]) == found["placements"]["parallel"]["simulated_step_ns"]


def test_states_that_fill_a_device_ask_for_tensor_parallelism(folder: Path) -> None:
    found = json.loads(run(*line(folder, *CLUSTER, "--state-bytes", "text=1900000000", "--json")).stdout)
    tower = found["placements"]["parallel"]["towers"][1]
    assert tower["tp"] == 2
    assert tower["device_bytes"] == 950_000_000


def test_what_does_not_fit_is_said(folder: Path) -> None:
    assert "tower image fits no device" in refused(*line(folder, *CLUSTER[:4], "--device-bytes", "1000"))
    one = ("--devices", "1", "--devices-per-node", "1", "--device-bytes", "100000000000")
    done = run(*line(folder, *one))
    assert done.returncode == 2
    assert "towers of a job have devices of their own: towers ['image', 'text'] need at least" in done.stderr
    assert "shared" in done.stdout
    found = json.loads(run(*line(folder, *one, "--json")).stdout)
    assert (sorted(found["refused"]), found["fastest"], found["modules"]) == (["equal", "parallel"], "shared", [])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "0"], "--steps 0; at least 1 of each is required"),
        (["--state-bytes", "image"], "--state-bytes image: NAME=BYTES is required, each tower of"),
        (["--state-bytes", "vit=3"], "--state-bytes vit=3: NAME=BYTES is required"),
        (["--state-bytes", "text=3", "--state-bytes", "text=4"], "--state-bytes text=4: NAME=BYTES is required"),
    ],
)  # fmt: skip
def test_wrong_arguments(folder: Path, more: list[str], message: str) -> None:
    assert message in refused(*line(folder, *CLUSTER, *more))


def test_a_job_without_towers_is_refused(folder: Path) -> None:
    stream = {"datasets": [{"name": "d"}], "seq_len": 512, "global_batch": 8}
    modules = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    job = {"stream": stream, "execution": {"modules": modules, "end": {"steps": 1}}}
    assert "the job has a pipelined layout; one with a contrastive layout is required" in refused(
        *line(folder, *CLUSTER, job=job)
    )


def test_costs_of_towers_are_fitted(folder: Path, tmp_path: Path) -> None:
    """From the times that trainers would report whose towers work exactly as the job says."""
    catalog = Catalog.open(load_config(None, {"datasets": {"d": folder}}))
    job = parse_job(fill_job(JOB, catalog))
    planner = JobPlanner(job, catalog.find_datasets(job.stream))
    reports = []
    for step in range(planner.num_steps):
        plan = planner.plan(step)
        for module in job.spec.execution.modules:
            cost = COSTS[module.name]
            _, total, squares = microbatch_sizes(plan, module)
            forward = cost.microbatch_ns + total * cost.linear_ps // 1_000 + squares * cost.quadratic_fs // 1_000_000
            for rank, times in enumerate(forward.tolist()):
                backward = [ns * cost.backward_percent // 100 for ns in times]
                where = {"job_id": job.job_id, "step": step, "module": module.name, "rank": rank}
                reports.append(pb.StepTimes(**where, forward_ns=times, backward_ns=backward))
    times = tmp_path / "times.jsonl"
    times.write_text("".join(MessageToJson(report, indent=None) + "\n" for report in reports))
    done = run(*line(folder, "--times", str(times), command="fit"))
    assert done.returncode == 0, done.stderr
    modules = yaml.safe_load(done.stdout[done.stdout.index("# For the next job") :])["execution"]["modules"]
    for module in modules:
        found, cost = Cost(**module["cost"]), COSTS[module["name"]]
        assert found.backward_percent == cost.backward_percent
        assert abs(found.linear_ps - cost.linear_ps) <= cost.linear_ps // 1_000
        assert abs(found.quadratic_fs - cost.quadratic_fs) <= cost.quadratic_fs // 100
