"""Mixtures that change, and streams that continue others, over a real server: as clients and trainers see them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from disttrain.v1 import data_service_pb2 as pb
from foreign import node
from program.conftest import Fleet
from program.runtime_cases import Degrees, job_data
from training.runs import Run

from dataserver.dataset import Dataset
from trainclient.client import DataClient
from trainclient.stream.errors import ClientError, StateError

ALONE = Degrees(1, 1, 1, 1)
WEIGHTS = [{"from_step": 0, "weight": "1"}, {"from_step": 2, "weight": "3"}]
Id = tuple[str, int, int]
"""Dataset, epoch and number of a sample."""


def mixture(**changes: Any) -> dict[str, Any]:
    """A job over `pairs` and `texts`, whose share is smaller from step 2 on."""
    return job_data(ALONE, **{"datasets": [{"name": "pairs", "weight": WEIGHTS}, {"name": "texts"}], **changes})


def read(client: DataClient, steps: int) -> list[list[Id]]:
    """The samples of each of some steps."""
    found: list[list[Id]] = []
    names = [spec.name for spec in client.job.stream.datasets]
    while len(found) < steps:
        last, of_step = False, []
        while not last:
            batch = next(client)
            items = batch.items
            of_step += [
                (names[d], int(e), int(s)) for d, e, s in zip(items.dataset, items.epoch, items.sample, strict=True)
            ]
            last = batch.last_of_step
        found.append(sorted(of_step))
    return found


def test_clients_read_mixtures_that_change_and_continue(fleet: Fleet) -> None:
    addresses, unpacked = fleet.address, {"packing": {"enabled": False}, "seq_len": 2048}
    with DataClient(addresses, mixture(**unpacked), "llm", 0) as client:
        before = read(client, 3)
        state = client.state_dict()
        with DataClient(addresses, client.job, "llm", 0, start_step=2) as other:
            assert read(other, 1) == before[2:]
    shares = [[sum(name == "texts" for name, _, _ in of) for of in before]]
    assert shares == [[4, 4, 2]]

    earlier = {"step": state["step"], "stream": json.loads(state["stream"])}
    data = mixture(**unpacked, datasets=[{"name": "texts"}, {"name": "docs"}], continues=earlier, end={"epochs": 1})
    with DataClient(addresses, data, "llm", 0) as client:
        assert client.step == 3
        with pytest.raises(StateError, match=r"step 2 of stream \w+, and this job continues stream \w+ from step 3 on"):
            client.load_state_dict({**state, "step": 2})
        client.load_state_dict(state)
        after = read(client, client.num_steps - 3)
        middle = {**client.state_dict(), "step": 5}
        with DataClient(addresses, client.job, "llm", 0) as other:
            other.load_state_dict(middle)
            assert read(other, 2) == after[2:4]
        with pytest.raises(StateError, match=r"found 2 as the step to start with; this job has steps 3 to"):
            DataClient(addresses, client.job, "llm", 0, start_step=2)
        with pytest.raises(ClientError, match="belongs to the stream that this one continues from step 3 on"):
            client.get_plan(2)
        request = pb.GetOrCreateJobRequest(job_spec_json=client.job.text)
        answer = client.fleet.call(lambda stub: stub.GetOrCreateJob, request)
        assert (answer.first_step, answer.num_steps) == (3, client.num_steps)
        for step, accepted in ((2, False), (3, True)):
            times = pb.StepTimes(job_id=client.job.job_id, step=step, module="llm", forward_ns=[1], backward_ns=[1])
            report = partial(client.fleet.call, lambda stub: stub.ReportStepTimes)
            if accepted:
                report(pb.ReportStepTimesRequest(times=times))
            else:
                with pytest.raises(ClientError, match=r"times of step 2 were reported; .*, begins with step 3"):
                    report(pb.ReportStepTimesRequest(times=times))
    samples = [of for step in (*before, *after) for of in step]
    for name in ("texts", "docs"):
        first = [number for of, epoch, number in samples if (of, epoch) == (name, 0)]
        assert len(first) == len(set(first)) == sum(s.num_samples for s in Dataset.open(fleet.folders[name]).shards)

    with DataClient(addresses, mixture(seed=8), "llm", 0) as stranger, pytest.raises(StateError, match="seed: 8 here"):
        stranger.load_state_dict(state)


def test_a_client_in_javascript_begins_where_the_stream_before_ended(fleet: Fleet, tmp_path: Path) -> None:
    node.require_node()
    with DataClient(fleet.address, mixture(), "llm", 0) as client:
        earlier = {"step": 3, "stream": json.loads(client.state_dict()["stream"])}
    with DataClient(fleet.address, mixture(continues=earlier), "llm", 0) as client:
        path = tmp_path / "job.json"
        path.write_text(client.job.text)
    found = node.read([fleet.address], path, "--module", "llm", "--steps", "1")
    assert {line["header"]["step"] for line in found.lines} == {"3"}


@pytest.mark.long
def test_a_run_goes_on_with_another_mixture(fleet: Fleet, tmp_path: Path) -> None:
    run = Run(fleet.address, tmp_path)
    datasets: list[dict[str, Any]] = [{"name": "pairs"}, {"name": "texts"}]
    code, errors = run.train(ALONE, "--steps", "2", stream={"datasets": datasets})
    assert code == 0, errors
    cursor = json.loads((run.checkpoints / "step-00000002" / "trainer.json").read_text())["cursor"]
    earlier = {"step": 2, "stream": json.loads(cursor["stream"])}
    datasets[1]["weight"] = "5"
    stream = {"datasets": datasets, "continues": earlier}

    code, errors = run.train(ALONE, "--steps", "4", stream={**stream, "continues": {**earlier, "step": 1}})
    assert code == 2
    assert "belongs to step 2 of stream" in errors
    assert "from step 1 on: resume from the checkpoint of that stream and step" in errors
    fresh = Run(fleet.address, tmp_path / "fresh")
    code, errors = fresh.train(ALONE, "--steps", "4", stream=stream)
    assert code == 2
    assert "continues another stream from step 2 on, and there is no checkpoint to resume" in errors

    code, errors = run.train(ALONE, "--steps", "4", stream=stream)
    assert code == 0, errors
    assert "changed on resume: stream.datasets[1].weight: '5' here, '1' there\n" in errors
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3]
    code, errors = run.train(ALONE, "--steps", "5", stream=stream)
    assert code == 0, errors
    assert "changed on resume" not in errors
    code, errors = run.train(ALONE, "--steps", "6", stream={"datasets": datasets})
    assert code == 2
    assert "differs in continues: None here" in errors
