"""The reader against servers that fail in every scripted way."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from client.fake_server import NUM_STEPS, Answers, FakeServer, fake_process
from client.opened import ALL, Opened, Serve
from disttrain.v1 import data_service_pb2 as pb

from trainclient.stream.endpoint import Timeouts
from trainclient.stream.errors import (
    DataServiceError,
    FleetError,
    PlanMismatchError,
    ProtocolError,
    ServerMismatchError,
)
from trainclient.stream.follower import ViewRequest
from trainclient.stream.microbatch import Cursor


def test_a_whole_job(serve: Serve, patient: Timeouts) -> None:
    server = serve()
    with Opened([server.address], patient) as opened:
        assert opened.read_all() == ALL
        assert next(opened.reader, None) is None
        assert opened.reader.cursor == Cursor(NUM_STEPS)
    assert len(server.requests) == 1


def test_the_header_as_plain_values(serve: Serve, patient: Timeouts) -> None:
    with Opened([serve().address], patient, start=Cursor(3, 2)) as opened:
        got = next(opened.reader)
    assert (got.job_id, got.stream_id) == (opened.job.job_id, opened.job.stream_id)
    assert (got.step, got.microbatch, got.num_microbatches, got.last_of_step) == (3, 2, 3, True)
    assert (got.text_tokens, got.target_patches, got.content_version) == (103, 7, 2)
    assert got.items.sample.tolist() == [3, 1 << 40]
    assert got.items.epoch.tolist() == [0, 1]
    assert got.items.valid.tolist() == [True, False]
    assert got.items.invalid.tolist() == [False, True]
    assert len(got.items) == 2
    assert got.sequence_valid.tolist() == [True]
    (routing,) = got.routings
    assert (routing.source_module, routing.target_module) == ("vit", "llm")
    assert (routing.target_microbatch.tolist(), routing.target_rank.tolist(), routing.rows.tolist()) == ([2], [1], [3])
    assert got.bfloat16 == {"half"}
    assert len(got.plan_hash) == 32
    assert got.nbytes >= sum(a.nbytes for a in got.tensors.values())


def test_selected_tensors_and_compression(serve: Serve, patient: Timeouts) -> None:
    server = serve()
    view = ViewRequest("llm", 1, tensors=("labels", "patches"), compress=True)
    with Opened([server.address], patient, view) as opened:
        got = next(opened.reader)
        assert set(got.tensors) == {"labels", "patches"}
        opened.check(got)
        opened.read_all()
    assert list(server.requests[0].tensors) == ["labels", "patches"]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["cut", "crc", "drain", "abort:{}:STORAGE_UNAVAILABLE", "abort:{}:TOO_MANY_STREAMS"])
def test_a_lost_stream_goes_on_elsewhere(serve: Serve, patient: Timeouts, kind: str, after: int) -> None:
    behaviour = kind.format(after) if "{}" in kind else f"{kind}:{after}"
    one, two = serve(streams=[behaviour]), serve()
    with Opened([one.address, two.address], patient) as opened:
        assert opened.read_all() == ALL
    assert len(one.requests) == 1
    assert [(r.start_step, r.start_microbatch) for r in two.requests] == [ALL[after]]


def test_a_single_server_is_asked_again(serve: Serve, patient: Timeouts) -> None:
    server = serve(streams=["cut:1", "crc:0", "cut:2", "drain:1", "cut:0"])
    with Opened([server.address], patient) as opened:
        assert opened.read_all() == ALL


def test_a_stalled_server_is_left(serve: Serve, quick: Timeouts) -> None:
    one, two = serve(streams=["hang:3"]), serve()
    with Opened([one.address, two.address], quick) as opened:
        assert opened.read_all() == ALL
        assert opened.reader.wait_s >= quick.stall
    assert [(r.start_step, r.start_microbatch) for r in two.requests] == [ALL[3]]


def test_all_servers_stall(serve: Serve, quick: Timeouts) -> None:
    one, two = serve(streams=["hang:0"] * 9), serve(streams=["hang:0"] * 9)
    with Opened([one.address, two.address], quick) as opened, pytest.raises(FleetError, match="no data came") as raised:
        opened.read_all()
    assert raised.value.failures.keys() == {one.address, two.address}


def test_a_slow_caller_is_no_stall(serve: Serve) -> None:
    server = serve()
    with Opened([server.address], Timeouts(stall=4.0), prefetch_bytes=1) as opened:
        found = []
        for microbatch in opened.reader:
            if len(found) == 4:
                threading.Event().wait(4.4)
            found.append((microbatch.step, microbatch.microbatch))
        assert found == ALL
    assert len(server.requests) == 1


def test_a_server_that_decodes_differently_is_passed_over(
    serve: Serve, patient: Timeouts, caplog: pytest.LogCaptureFixture
) -> None:
    used = serve(streams=["cut:2", "cut:3"])
    odd = serve(info={"content_digest": "other", "release": "2.0"})
    with Opened([used.address, odd.address], patient) as opened:
        assert opened.read_all() == ALL
    assert not odd.requests
    named = [message for message in caplog.messages if "decode differently" in message]
    assert len(named) == 1
    assert used.address in named[0]
    assert odd.address in named[0]


def test_what_counts_is_whose_bytes_were_used_not_who_answered_first(serve: Serve, patient: Timeouts) -> None:
    odd = serve(info={"content_digest": "other"}, streams=["abort:0:INTERNAL"] * 50)
    with Opened([odd.address, serve().address, serve().address], patient) as opened:
        assert opened.read_all() == ALL


def test_a_fleet_ends_when_nobody_decodes_like_the_lost_server(serve: Serve, quick: Timeouts) -> None:
    used, odd = serve(streams=["cut:2"]), serve(info={"content_digest": "other"})
    with Opened([used.address, odd.address], quick) as opened:
        next(opened.reader)
        used.close()
        with pytest.raises(FleetError, match="no server could go on for 3 s") as raised:
            opened.read_all()
    assert "decode differently" in raised.value.failures[odd.address]
    assert "UNAVAILABLE" in raised.value.failures[used.address]


def test_a_server_that_was_started_again_is_asked_again_how_it_decodes(serve: Serve, patient: Timeouts) -> None:
    server = serve(streams=["idle:2"], delay_s=0.5)
    with Opened([server.address], patient) as opened:
        next(opened.reader)
        server.answers.info, server.answers.forgets_jobs = {"content_digest": "other"}, 1
        with pytest.raises(ServerMismatchError, match="decode differently"):
            opened.read_all()


def test_a_server_that_only_shuts_down_does_not_hide_that_the_others_are_dead(serve: Serve, quick: Timeouts) -> None:
    draining = serve(streams=["drain:0"] * 10_000)
    reached = pytest.raises(FleetError, match="no server could go on for 3 s")
    with Opened([draining.address, "127.0.0.1:1"], quick) as opened, reached:
        opened.read_all()
    assert len(draining.requests) < 100


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("kind", ["idle", "part"])
def test_a_stream_that_ended_as_idle_goes_on_at_the_same_server(
    serve: Serve, patient: Timeouts, caplog: pytest.LogCaptureFixture, kind: str, after: int
) -> None:
    one, two = serve(streams=[f"{kind}:{after}", f"{kind}:2"]), serve()
    with Opened([one.address, two.address], patient) as opened:
        assert opened.read_all() == ALL
    starts = [ALL[0], ALL[after], ALL[after + 2]]
    assert [(r.start_step, r.start_microbatch) for r in one.requests] == starts
    assert not two.requests
    assert not caplog.messages, "it was taken for a failure"


def test_a_server_that_calls_every_client_idle_is_left(serve: Serve, patient: Timeouts, quick: Timeouts) -> None:
    one, two = serve(streams=["idle:0"] * 50), serve()
    with Opened([one.address, two.address], patient) as opened:
        assert opened.read_all() == ALL
    assert len(one.requests) == 2
    server = serve(streams=["part:0"] * 500)
    with Opened([server.address], quick) as opened, pytest.raises(FleetError, match="ended two streams as idle"):
        opened.read_all()


def test_an_unknown_job_is_brought_again(serve: Serve, patient: Timeouts) -> None:
    server = serve(streams=["cut:2"], forgets_jobs=1)
    with Opened([server.address], patient) as opened:
        assert opened.read_all() == ALL
    assert server.registrations == 2


def test_a_server_may_take_longer_to_learn_a_job_than_to_send_a_microbatch(
    serve: Serve, patient: Timeouts, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(forgets_jobs=1, job_delay_s=1.5)
    with Opened([server.address], replace(patient, stall=0.5)) as opened:
        assert opened.read_all() == ALL
    assert not caplog.messages, "the call that brings the job was cut"


def test_draining_refusals_and_all_servers_draining(serve: Serve, quick: Timeouts) -> None:
    servers = [serve(streams=["drain:1", *["abort:0:DRAINING"] * 50]), serve(streams=["abort:0:DRAINING"] * 50)]
    with Opened([s.address for s in servers], quick) as opened, pytest.raises(FleetError, match="DRAINING"):
        opened.read_all()


@pytest.mark.parametrize("reason", ["TENSOR_UNKNOWN", "UNHEARD_OF"])
def test_what_no_server_would_answer_otherwise_is_raised_at_once(serve: Serve, patient: Timeouts, reason: str) -> None:
    one, two = serve(streams=[f"abort:2:{reason}"]), serve()
    with Opened([one.address, two.address], patient) as opened:
        assert [next(opened.reader).cursor, next(opened.reader).cursor] == [Cursor(0, 0), Cursor(0, 1)]
        for _ in range(2):
            with pytest.raises(DataServiceError, match=f"scripted {reason}"):
                next(opened.reader)
    assert not two.requests


def test_another_server_takes_over_from_one_that_refuses(serve: Serve, patient: Timeouts) -> None:
    one, two = serve(streams=["abort:2:INTERNAL"] * 50), serve(streams=["abort:1:STORAGE_UNAVAILABLE"])
    with Opened([one.address, two.address], patient) as opened:
        assert opened.read_all() == ALL
    assert len(two.requests) == 2


def test_progress_after_a_pause_starts_the_patience_anew(serve: Serve) -> None:
    """Two failures, further apart than `give_up`, each mended within it."""
    server = serve(streams=["abort:0:STORAGE_UNAVAILABLE", "abort:5:STORAGE_UNAVAILABLE"], delay_s=0.5)
    with Opened([server.address], Timeouts(give_up=2.0)) as opened:
        assert opened.read_all() == ALL


def test_the_end_comes_at_once_when_every_server_refuses(serve: Serve) -> None:
    """Not after `give_up`, whose default is longer than this test may take."""
    servers = [serve(streams=["abort:2:INTERNAL"] * 50), serve(streams=["abort:0:INTERNAL"] * 50)]
    with Opened([s.address for s in servers], Timeouts()) as opened:
        assert [next(opened.reader).cursor, next(opened.reader).cursor] == [Cursor(0, 0), Cursor(0, 1)]
        with pytest.raises(FleetError, match="no server can do this") as raised:
            next(opened.reader)
    assert raised.value.failures.keys() == {s.address for s in servers}
    assert [len(s.requests) for s in servers] == [1, 1]


def test_a_server_that_refuses_is_not_asked_again_while_the_others_are_tried(serve: Serve, patient: Timeouts) -> None:
    odd = serve(streams=["abort:0:INTERNAL"] * 50)
    busy = serve(streams=["abort:0:TOO_MANY_STREAMS"] * 3)
    with Opened([odd.address, busy.address], patient) as opened:
        assert opened.read_all() == ALL
    assert (len(odd.requests), len(busy.requests)) == (1, 4)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("skip:1", r"sent Cursor\(step=1, microbatch=0\), the next one is Cursor\(step=0, microbatch=1\)"),
        ("end:3", "ended the job before"),
        ("huge:1", "announces a microbatch of 1099511627776 bytes"),
    ],
)
def test_violations_of_the_protocol(serve: Serve, patient: Timeouts, behaviour: str, message: str) -> None:
    server = serve(streams=[behaviour])
    with Opened([server.address], patient) as opened, pytest.raises(ProtocolError, match=message) as raised:
        opened.read_all()
    assert server.address in str(raised.value)


class Odd(FakeServer):
    """Sends headers and ends otherwise."""

    change: Callable[[pb.StreamMicrobatchesResponse], object]

    def StreamMicrobatches(self, request, context):  # noqa: N802
        for response in super().StreamMicrobatches(request, context):
            if response.HasField("end") or response.HasField("header"):
                self.change(response)
            yield response


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "job_id",
            "x",
            r"it sent a microbatch of \(job, stream, content version\) \('x', '\w{64}', 2\), asked was \('\w",
        ),
        ("stream_id", "x", r"it sent a microbatch of .* \('\w{64}', 'x', 2\), asked was \('\w{64}', '\w{64}', 2\)"),
        ("content_version", 1, r"it sent a microbatch of .* \('\w{64}', '\w{64}', 1\), asked was \('\w"),
        ("withheld", True, "it withheld the tensors of a microbatch that this client shares with no other"),
        ("reason", 99, "it ended the stream for the unknown reason 99"),
    ],
)
def test_a_server_that_sends_what_was_not_asked_for(patient: Timeouts, field: str, value: object, message: str) -> None:
    def change(response: pb.StreamMicrobatchesResponse) -> None:
        part = response.end if response.HasField("end") else response.header
        if field in part.DESCRIPTOR.fields_by_name:
            setattr(part, field, value)

    with Odd(Answers(streams=["end:3"])) as server:
        server.change = change
        with Opened([server.address], patient) as opened, pytest.raises(ProtocolError, match=message):
            opened.read_all()


def test_another_plan_within_a_step(serve: Serve, patient: Timeouts) -> None:
    server = serve(streams=["hash:3"])
    with (
        Opened([server.address], patient) as opened,
        pytest.raises(PlanMismatchError, match="plans step 1 as 78787878"),
    ):
        opened.read_all()


def test_another_plan_after_a_reconnect_in_mid_step(serve: Serve, patient: Timeouts) -> None:
    one, two = serve(streams=["cut:3"]), serve(content="other release")
    with Opened([one.address, two.address], patient) as opened, pytest.raises(PlanMismatchError) as raised:
        opened.read_all()
    assert one.address in str(raised.value)
    assert two.address in str(raised.value)


def test_another_plan_from_the_next_step_on_is_not_seen_here(serve: Serve, patient: Timeouts) -> None:
    one, two = serve(streams=["drain:2"]), serve(content="other release")
    with Opened([one.address, two.address], patient) as opened:
        assert opened.read_all() == ALL  # modules compare hashes with each other before they exchange embeddings


def test_kill_9_in_mid_stream(serve: Serve, patient: Timeouts) -> None:
    with fake_process(delay_s=0.1) as (victim, address), Opened([address, serve().address], patient) as opened:
        found = [next(opened.reader).cursor for _ in range(3)]
        victim.kill()
        found += [m.cursor for m in opened.reader]
        assert found == [Cursor(*c) for c in ALL]
