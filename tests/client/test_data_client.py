"""DataClient: jobs filled in, torch tensors, the state of a checkpoint."""

import json
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from client.fake_server import FINGERPRINT, NUM_STEPS, TOKENIZER, FakeServer, arrays_of, job_data, num_microbatches

from dataserver.planning.job.identity import JobSpecError, canonical_json, parse_job
from dataserver.planning.job.spec import JobSpec
from trainclient.client import DataClient, TorchBuffers, as_torch
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.errors import ClosedError, FleetError, StateError
from trainclient.stream.fleet import Fleet
from trainclient.stream.follower import ViewRequest
from trainclient.stream.handoff import Handoff
from trainclient.stream.jobs import JobSource, resolve_job
from trainclient.stream.reader import MicrobatchReader

Serve = Callable[..., FakeServer]
ALL = [(step, m) for step in range(NUM_STEPS) for m in range(num_microbatches(step))]


@pytest.fixture
def connect(serve: Serve, patient: Timeouts):
    """Open clients of one server."""
    server = serve()
    clients: list[DataClient] = []

    def opened(job: JobSource | None = None, **options) -> DataClient:
        given = {"module": "llm", "rank": 0, "timeouts": patient, **options}
        clients.append(DataClient(server.address, job_data() if job is None else job, **given))
        return clients[-1]

    opened.server = server
    yield opened
    for client in clients:
        client.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("reader-")]


def cursors(client: DataClient) -> list[tuple[int, int]]:
    return [(b.step, b.microbatch) for b in client]


def test_batches_are_torch_tensors_over_the_received_bytes(connect) -> None:
    client = connect()
    assert client.num_steps == NUM_STEPS
    held = []
    for batch in client:
        expected = arrays_of(client.job.job_id, "llm", 0, batch.step, batch.microbatch)
        held.append((batch, expected))
    assert [(b.step, b.microbatch) for b, _ in held] == ALL
    for batch, expected in held:
        assert batch.tensors["patches"].dtype is torch.uint8
        assert batch.tensors["labels"].dtype is torch.int32
        assert batch.tensors["half"].dtype is torch.bfloat16
        assert batch.tensors["empty"].shape == (0, 2)
        for name in ("patches", "labels"):
            np.testing.assert_array_equal(batch.tensors[name].numpy(), expected[name])
        np.testing.assert_array_equal(batch.tensors["half"].view(torch.uint16).numpy(), expected["half"])
        spans = [t.untyped_storage().data_ptr() for t in batch.tensors.values() if t.numel()]
        assert max(spans) - min(spans) < batch.nbytes  # one buffer, no copy of any tensor
    assert client.wait_s == pytest.approx(sum(b.wait_s for b, _ in held))


def test_jobs_in_every_form_are_one_job(connect, tmp_path: Path, patient: Timeouts) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_data()))
    first = connect()
    spec = first.job.spec
    assert spec.stream.datasets[0].fingerprint == FINGERPRINT
    assert spec.stream.tokenizer.digest == TOKENIZER
    assert (spec.stream.tokenizer.vocab_size, spec.stream.tokenizer.bos, spec.stream.tokenizer.query) == (262, 256, 261)
    forms = [path, str(path), json.dumps(job_data()), spec, first.job, canonical_json(spec).decode()]
    fleet = Fleet(connect.server.address, timeouts=patient)
    assert {resolve_job(form, fleet).job_id for form in forms} == {first.job.job_id}
    fleet.close()


def test_what_the_job_says_stands(connect) -> None:
    client = connect(job_data(tokenizer={"vocab_size": 300, "bos": 299}))
    tokenizer = client.job.stream.tokenizer
    assert (tokenizer.digest, tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (TOKENIZER, 300, 299, 257)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (job_data(datasets=[{"name": "paris"}]), r"is named 'paris', there are \['pairs'\]"),
        (job_data(tokenizer={"name": "gpt9"}), r"is named 'gpt9', there are \['bytes'\]"),
        (job_data(seq_len=3), "stream.seq_len"),
        (job_data(colour=3), "stream.colour"),
        (job_data(global_batch=3), "use a multiple of 2"),
        ({"stream": 3}, "stream"),
        ({}, "Field required"),
        ("{]", "not valid JSON"),
        ('{"stream": 1, "stream": 2}', r"names \['stream'\] twice"),
        (job_data(seed={1}), "the job holds what JSON cannot say"),
        ("/nowhere/job.yaml", "cannot be read: No such file"),
    ],
)
def test_wrong_jobs_are_one_clear_error(connect, job: JobSource, message: str) -> None:
    with pytest.raises(JobSpecError, match=message):
        connect(job)


def test_wrong_yaml(connect, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for text, message in (
        ("a: [", "not valid YAML"),
        ("a: 1\na: 2", "key 'a' stands twice"),
        ("- 1", "a mapping"),
        ("x" * (1 << 20) + "x", "1048577 bytes; at most 1048576"),
    ):
        path.write_text(text)
        with pytest.raises(JobSpecError, match=message):
            connect(path)


def test_wrong_module_rank_tensors_and_step(connect) -> None:
    with pytest.raises(ValueError, match=r"'lmm' is not in the job; it has \['vit', 'llm'\]"):
        connect(module="lmm")
    for rank in (2, -1):
        with pytest.raises(ValueError, match=rf"rank {rank} of module llm does not exist; its dp is 2"):
            connect(rank=rank)
    with pytest.raises(ValueError, match="empty list of tensors"):
        connect(tensors=[])
    for step in (-1, NUM_STEPS + 1, True, 1.0):
        with pytest.raises(StateError, match="as the step to start with; this job has steps 0 to 3"):
            connect(start_step=step)


@pytest.mark.timeout(20)
def test_wrong_address_is_one_error(quick: Timeouts) -> None:
    with pytest.raises(FleetError, match="no server could be reached for 3 s; check the addresses"):
        DataClient("127.0.0.1:1", job_data(), "llm", 0, timeouts=quick)


def test_the_state_follows_what_was_handed_out(connect) -> None:
    client = connect()
    assert client.state_dict()["step"] == 0
    for batch in client:
        assert client.state_dict()["step"] == batch.step + batch.last_of_step
    assert client.state_dict()["step"] == NUM_STEPS


def test_resume_after_every_step_twice_in_a_row(connect) -> None:
    for first in range(NUM_STEPS + 1):
        for second in range(first, NUM_STEPS + 1):
            one = connect()
            seen = [next(one) for _ in [c for c in ALL if c[0] < first]]
            two = connect()
            two.load_state_dict(json.loads(json.dumps(one.state_dict())))
            assert two.state_dict() == one.state_dict()
            seen += [next(two) for _ in [c for c in ALL if first <= c[0] < second]]
            three = connect()
            three.load_state_dict(two.state_dict())
            assert [(b.step, b.microbatch) for b in seen] + cursors(three) == ALL
            for client in (one, two, three):
                client.close()


def test_a_state_of_mid_step_repeats_the_step(connect) -> None:
    client = connect()
    for _ in range(3):
        next(client)
    client.load_state_dict(client.state_dict())
    assert cursors(client) == [c for c in ALL if c[0] >= 1]
    assert client.wait_s > 0


def test_resume_at_the_end_ends(connect) -> None:
    assert cursors(connect(start_step=NUM_STEPS)) == []


def test_another_layout_of_the_stream_resumes(connect) -> None:
    data = job_data()
    other = {**data, "execution": {**data["execution"], "modules": [{"name": "llm", "kind": "backbone", "pp": 4}]}}
    client, resumed = connect(data), connect(other)
    for _ in range(2):
        next(client)
    assert resumed.job.job_id != client.job.job_id
    resumed.load_state_dict(client.state_dict())
    assert next(resumed).step == 1


def test_another_stream_is_refused_with_the_fields_that_differ(connect) -> None:
    state = connect(job_data(seq_len=256, seed=5)).state_dict()
    client = connect()
    with pytest.raises(StateError) as raised:
        client.load_state_dict(state)
    assert "seed: 0 here, 5 there; seq_len: 128 here, 256 there" in str(raised.value)
    assert "global_batch" not in str(raised.value)
    for stream in (None, "{", 3):
        with pytest.raises(StateError, match="fields that the checkpoint does not tell"):
            client.load_state_dict({**state, "stream": stream})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, this release reads version 1"),
        ({"version": None}, "version None"),
        ({"step": -1}, "found -1"),
        ({"step": NUM_STEPS + 1}, "found 5"),
        ({"step": "1"}, "found '1'"),
        ({"step": None}, "found None"),
    ],
)
def test_broken_states(connect, change: dict[str, object], message: str) -> None:
    client = connect()
    with pytest.raises(StateError, match=message):
        client.load_state_dict({**client.state_dict(), **change})
    assert cursors(client) == ALL


def test_the_state_is_small_and_plain(connect) -> None:
    state = connect().state_dict()
    assert len(json.dumps(state)) < 2000
    assert set(state) == {"version", "stream_id", "step", "stream"}


def test_step_times_are_reported(connect) -> None:
    client = connect(rank=1)
    assert client.report_step_times(2, step_time_s=1.5, data_wait_s=0.25, stage=1, forward_ns=[1, 2], backward_ns=[3])
    (times,) = connect.server.reports
    assert (times.job_id, times.step, times.module, times.rank, times.stage) == (client.job.job_id, 2, "llm", 1, 1)
    assert (times.step_time.ToNanoseconds(), times.data_wait.ToNanoseconds()) == (1_500_000_000, 250_000_000)
    assert (list(times.forward_ns), list(times.backward_ns)) == ([1, 2], [3])
    connect.server.jobs.clear()
    before = connect.server.registrations
    assert not client.report_step_times(2, step_time_s=1.0, data_wait_s=0.0)
    assert connect.server.registrations == before, "a report does not wait for a server to size the job"
    connect.server.close()
    assert not client.report_step_times(3, step_time_s=1.0, data_wait_s=0.0)


def test_plans_are_fetched(connect) -> None:
    client = connect()
    assert client.get_plan(2).step == 2


def test_a_closed_client_says_so(connect) -> None:
    with connect() as client:
        batch = next(client)
    with pytest.raises(ClosedError, match="closed"):
        next(client)
    assert batch.tensors["labels"].sum() >= 0
    client.close()


def test_ids_are_those_of_the_planner(connect) -> None:
    client = connect()
    assert client.job == parse_job(JobSpec.model_dump(client.job.spec, mode="json", exclude_none=True))


def test_memory_of_torch_stays_memory_of_torch(connect) -> None:
    client = connect()
    view = ViewRequest("llm", 0, compress=True)
    buffers = TorchBuffers(pin_memory=False)
    with MicrobatchReader(client.fleet, client.job, view, num_steps=NUM_STEPS, buffers=buffers) as reader:
        for microbatch in reader:
            batch = as_torch(microbatch)
            storages = {t.untyped_storage().data_ptr() for t in batch.tensors.values()}
            assert len(storages) == 1  # every tensor is a view of the one that owns the memory
            expected = arrays_of(client.job.job_id, "llm", 0, batch.step, batch.microbatch)
            for name in ("patches", "labels"):
                np.testing.assert_array_equal(batch.tensors[name].numpy(), expected[name])
            assert batch.tensors["half"].dtype is torch.bfloat16
            assert batch.tensors["empty"].shape == (0, 2)


def test_pinned_memory(connect) -> None:
    if torch.cuda.is_available():
        assert next(connect(pin_memory=True)).tensors["patches"].is_pinned()
    else:
        with pytest.raises(ValueError, match="torch finds no GPU here"):
            connect(pin_memory=True)


@pytest.mark.parametrize("read", [0, 1, len(ALL) - 1])
def test_an_interrupt_loses_no_microbatch(connect, monkeypatch: pytest.MonkeyPatch, read: int) -> None:
    """One that comes between the receiver's queue and the caller, who goes on all the same, as in a notebook."""
    client, take = connect(), Handoff.take

    def interrupted(handoff: Handoff, on_stall: Callable[[], None]) -> None:
        take(handoff, on_stall)
        raise KeyboardInterrupt

    found = [(m.step, m.microbatch) for m in islice(client, read)]
    monkeypatch.setattr(Handoff, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(client)
    monkeypatch.undo()
    found += [(m.step, m.microbatch) for m in client]
    assert found == ALL
