"""Contexts and ids: who belongs to whom, and that nothing happens where nobody traces."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataserver.tracing import (
    Collector,
    Context,
    Kind,
    Recorder,
    StepTraces,
    Tracing,
    TracingError,
    carried,
    incoming,
    opened,
    outgoing,
    recorder_to,
    span,
    within,
)
from dataserver.tracing.spans import Finished, traceparent

RUN, READER = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
IDS = f"run:{RUN:032x};reader:{READER:016x}"


class Recording:
    """All spans that were recorded."""

    def __init__(self) -> None:
        self.spans: list[Finished] = []

    def record(self, finished: Finished) -> None:
        self.spans.append(finished)


@pytest.fixture
def recording() -> Recording:
    return Recording()


def test_spans_of_a_thread_are_nested(recording: Recording) -> None:
    with opened(Context(recording, RUN, READER), "outer", Kind.SERVER, step=3) as outer:
        with span("inner") as inner:
            inner.note(bytes=7)
            assert outgoing() == (("traceparent", traceparent(RUN, inner.context.span_id)),)
        with pytest.raises(FileNotFoundError), span("failed"):
            raise FileNotFoundError("/a/path/that/nobody/may/see")
    found = {one.name: one for one in recording.spans}
    assert [found[name].parent_id for name in ("outer", "inner", "failed")] == [READER, *[outer.context.span_id] * 2]
    assert {one.trace_id for one in recording.spans} == {RUN}
    assert len({one.span_id for one in recording.spans}) == 3
    assert found["outer"].attributes == {"step": 3}
    assert found["inner"].attributes == {"bytes": 7}
    assert (found["failed"].error, found["outer"].error) == ("FileNotFoundError", "")
    assert found["outer"].start_ns <= found["inner"].start_ns <= found["inner"].end_ns <= found["outer"].end_ns
    outer.end()
    assert len(recording.spans) == 3, "it ends once"


def test_other_threads_are_given_the_context(recording: Recording) -> None:
    def work() -> None:
        with span("there"):
            pass

    with opened(Context(recording, RUN, READER), "here") as here:
        for function in (work, carried(work)):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()
        assert [(one.name, one.parent_id) for one in recording.spans] == [("there", here.context.span_id)]
        with within(None):
            work()
        assert len(recording.spans) == 1


def test_without_a_context_nothing_is_made(recording: Recording) -> None:
    assert span("one") is span("other", bytes=1) is opened(None, "third")
    assert span("one").context is outgoing() is incoming(None, [("traceparent", traceparent(1, 2))]) is None
    assert carried(recording.record) == recording.record
    with span("one") as nothing, span("inner"):
        nothing.note(bytes=1)
        assert outgoing() is None
    assert recording.spans == []


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"00-{RUN:032x}-{READER:016x}-00",
        f"01-{RUN:032x}-{READER:016x}-01",
        f"00-{0:032x}-{READER:016x}-01",
        f"00-{RUN:032x}-{0:016x}-01",
        f"00-{RUN:032X}-{READER:016x}-01",
        f"00-{RUN:032x}-{READER:016x}-01-more",
        f"00-{RUN:032x}-{READER:016x}-01\n",
        "00-" + "٣" * 32 + "-" + "1" * 16 + "-01",
        b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ],
)
def test_what_is_no_sampled_traceparent_is_ignored(recording: Recording, value: str | bytes) -> None:
    assert incoming(recording, [("other", "x"), ("traceparent", value)]) is None


@pytest.mark.parametrize(
    "state",
    [
        "",
        f"disttrain=every:0;{IDS}",
        f"disttrain=every:-1;{IDS}",
        f"disttrain=every:1e9;{IDS}",
        f"disttrain=every:{'9' * 99};{IDS}",
        f"other=every:1;{IDS}",
        f"disttrain=every:1;{IDS};more",
        f"disttrain=every:1;{IDS}\n",
        f"disttrain=every:1;{IDS.upper()}",
        f"disttrain=every:1;run:{0:032x};reader:{READER:016x}",
        f"disttrain=every:1;run:{RUN:032x};reader:{0:016x}",
        f"disttrain=every:1;{IDS}".encode(),
        "disttrain=every:1",
    ],
)
def test_a_client_that_does_not_say_which_steps_traces_none(recording: Recording, state: str | bytes) -> None:
    """Such as one that instruments all calls of gRPC."""
    assert StepTraces.read(recording, [("traceparent", traceparent(RUN, READER)), ("tracestate", state)]) is None


def test_both_sides_make_the_same_ids(recording: Recording) -> None:
    client = StepTraces(recording, RUN, READER, 10)
    other_rank = StepTraces(recording, RUN, READER + 1, 10)
    sent = dict(client.metadata)
    assert sent["traceparent"] == traceparent(RUN, READER)
    passed_on = [("traceparent", traceparent(7, 8)), ("tracestate", f"vendor=1, {sent['tracestate']} ,more=2")]
    server = StepTraces.read(recording, passed_on)
    assert server == client, "although what carried it put its own span in front"
    assert StepTraces.read(None, passed_on) is None
    assert client.of_wait(3, 0) is None
    ids = {
        (step, n): (server.of_wait(step, n).trace_id, server.of_wait(step, n).span_id)
        for step in (0, 10)
        for n in (0, 1)
    }
    assert len({span for _, span in ids.values()}) == 4
    assert ids[0, 0][0] == ids[0, 1][0] != ids[10, 0][0]
    assert other_rank.of_wait(10, 1).trace_id == ids[10, 1][0]
    assert other_rank.of_wait(10, 1).span_id != ids[10, 1][1]
    assert ids[10, 1] == (0xFFAC14B1183905CDC80B012A1511D8A6, 0x2D0271260E0A7C07), (
        "as data_service.proto has it; other clients make the same"
    )
    client.waited(10, 1, (5, 7), rank=0)
    other_rank.waited(10, 1, (6, 8), rank=1)
    client.waited(11, 1, (8, 9), rank=0)
    client.stepped(10, (4, 9))
    client.stepped(11, (9, 9))
    waits, root = recording.spans[:2], recording.spans[2]
    assert (waits[0].trace_id, waits[0].span_id) == ids[10, 1]
    assert {one.parent_id for one in waits} == {root.span_id}
    assert root.parent_id == 0
    assert [(one.name, one.start_ns, one.end_ns) for one in recording.spans] == [
        ("wait", 5, 7),
        ("wait", 6, 8),
        ("step", 4, 9),
    ]


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "127.0.0.1:4317",
        "ftp://a:1",
        "http://a",
        "http://a:b",
        "http://a:99999",
        "http://a:0",
        "http://u:secret@a:1",
        "https://u:se@cret@a:1",
        "u:secret@a:1",
        "http://@a:1",
        "http://a:1/x",
        "http://a:1?token=secret",
        "http://a:1#secret",
        "http://a:1#",
        "\nhttp://a:1",
        "http://a:1\n",
        "http://a b:1",
        "HTTP://a:1",
        "http://a\\b:1",
    ],
)
def test_what_is_no_collector_is_refused(endpoint: str) -> None:
    with pytest.raises(TracingError, match=r"http://HOST:PORT, or https://HOST:PORT with TLS, is required") as caught:
        Tracing(endpoint, insecure=True)
    assert not any(part in str(caught.value) for part in ("secret", "u:", "cret"))


@pytest.mark.parametrize("endpoint", ["http://10.0.0.1:4317", "http://[2001:db8::1]:4317", "http://collector:4317/"])
def test_nothing_travels_unencrypted_beyond_this_machine_unless_it_may(endpoint: str) -> None:
    with pytest.raises(TracingError, match="traces and tokens would travel unencrypted: use https://"):
        Tracing(endpoint)
    address = endpoint.removeprefix("http://").removesuffix("/")
    assert Collector.of(endpoint, insecure=True) == Collector(address, secure=False)
    assert Collector.of(endpoint.replace("http:", "https:"), insecure=False) == Collector(address, secure=True)
    Tracing("http://[::1]:4317")


HERE = Collector("127.0.0.1:4317", secure=False)
SECURE = Collector("127.0.0.1:4317", secure=True)


def test_threads_share_one_recorder() -> None:
    barrier = threading.Barrier(8)

    def ask() -> Recorder:
        barrier.wait()
        return recorder_to(HERE, "disttrain-threads")

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(ask) for _ in range(8)]
        assert len({id(one.result()) for one in found}) == 1


@pytest.mark.parametrize(
    ("collector", "variables", "problem"),
    [
        (HERE, {"COMPRESSION": "zip"}, "cannot be set up .*zip.*COMPRESSION.*correct or unset the variables OTEL_"),
        (HERE, {"TRACES_TIMEOUT": "soon"}, "cannot be set up .*soon"),
        (SECURE, {"CERTIFICATE": "/missing.pem"}, "file of authorities /missing.pem cannot be read: No such file"),
        (SECURE, {"TRACES_CERTIFICATE": "/etc/passwd"}, "file of authorities /etc/passwd cannot be used"),
        (SECURE, {"CLIENT_KEY": "/missing.pem"}, "belong together, and one is missing"),
        (SECURE, {"CLIENT_KEY": "/missing.pem", "CLIENT_CERTIFICATE": "/missing.pem"}, "cannot be read: No such file"),
    ],
)
def test_variables_that_cannot_be_used_are_refused(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, variables: dict[str, str], problem: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    with pytest.raises(TracingError, match=problem):
        recorder_to(collector, "disttrain-variables")


def test_variables_of_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_EXPORT_BATCH_SIZE", "MAX_QUEUE_SIZE", "SCHEDULE_DELAY", "EXPORT_TIMEOUT"):
        monkeypatch.setenv(f"OTEL_BSP_{name}", "10000")
    recorder_to(HERE, "disttrain-batches")


def test_steps_are_every_nth() -> None:
    with pytest.raises(ValueError, match=r"every is 0; 1 \(all steps\) or more is required"):
        Tracing("http://127.0.0.1:4317", every=0)
