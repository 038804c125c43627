"""`dataserver top` before real servers, and before what only looks like one."""

import os
import pty
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli.server_process import TIMEOUT_S, command, refused, run
from disttrain.v1 import admin_service_pb2 as pb
from disttrain.v1.admin_service_pb2_grpc import (
    AdminServiceServicer,
    AdminServiceStub,
    add_AdminServiceServicer_to_server,
)
from google.protobuf.duration_pb2 import Duration
from ports import free_addresses
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from serving.harness import FIXED_WINDOW, Running, index, job_data, running
from shards import break_images, write_pairs

from dataserver.cli.fleet_tables import fleet_tables
from dataserver.reporting import fleet_numbers as numbers
from dataserver.reporting.fleet_calls import DOES_NOT_ANSWER
from dataserver.reporting.fleet_failures import Failed
from dataserver.reporting.fleet_look import Fleet
from dataserver.serving.metrics_families import metrics_registry

ONCE = ("--once", "--interval-s", "0.2")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """One with a stream whose consumer took a step and then nothing more, and an invalid image."""
    folder = index(write_pairs(tmp_path / "d", 16, 16, seed=6))
    break_images(folder, (3, 0))
    with running({"d": folder}, FIXED_WINDOW) as found:
        yield found


def metrics(server: Running) -> pb.GetMetricsResponse:
    return AdminServiceStub(server.channel).GetMetrics(pb.GetMetricsRequest(), timeout=TIMEOUT_S)


def half_read(server: Running) -> tuple[Any, str]:
    layout = {"kind": "pipelined", "fewest_microbatches": True}  # so that the first one has the invalid image
    data = job_data(datasets=[{"name": "d"}], end={"steps": 1000}, generation={"ratio": "0"}, layout=layout)
    job_id = server.create(data).job_id
    stream = server.stream(job_id)
    seen = 0
    while seen < 2:
        seen += next(stream).WhichOneof("message") == "header"
    end = time.monotonic() + TIMEOUT_S
    while not (found := metrics(server)).ranks[0].HasField("sent_step") or not found.ranks[0].ready_microbatches:
        assert time.monotonic() < end
        time.sleep(0.02)
    return stream, job_id


def rows(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines()]


def test_one_table_of_servers_and_ranks(server: Running) -> None:
    stream, job_id = half_read(server)
    done = run("top", server.address, *ONCE)
    stream.cancel()
    assert done.returncode == 0
    (row,) = [row for row in rows(done.stdout) if row[:1] == [server.address]]
    assert row[3] == "1", "a stream"
    assert row[7] == str(metrics(server).invalid_images)
    assert int(row[7]) >= 1
    assert "consumer" in row
    (rank,) = [row for row in rows(done.stdout) if row[:1] == [job_id[:12]]]
    assert rank[1:5] == ["vit", "0", "-", "-"], "nobody said what the trainer took"
    assert int(rank[5]) > 0
    assert rank[-1] == server.address
    shard = server.catalog.datasets["d"].shards[0]
    (failed,) = [row for row in rows(done.stdout) if row[:1] == ["image"]]
    assert failed[1:5] == ["d", shard.name, shard.keys()[3], str(metrics(server).invalid_images)]
    assert failed[7] == server.address


def counted(found: pb.GetMetricsResponse) -> pb.GetMetricsResponse:
    """Without what is another number at every reading."""
    counters = pb.GetMetricsResponse()
    counters.CopyFrom(found)
    counters.ClearField("uptime")
    counters.ClearField("resident_bytes")
    counters.ClearField("wanted_cores")
    return counters


def readings(server: Running) -> tuple[pb.GetMetricsResponse, str]:
    """Numbers that no longer move, and the endpoint's text at the same time.

    What was in the making when the last stream was closed may still end: nothing moved where the call gives the same
    before and after the text, since counters never go back.
    """
    end = time.monotonic() + TIMEOUT_S
    while True:
        before = metrics(server)
        text = generate_latest(metrics_registry(server.server.metrics)).decode()
        if counted(metrics(server)) == counted(before):
            return before, text
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_call_gives_the_numbers_of_the_endpoint(server: Running) -> None:
    sent = metrics(server).sent_microbatches
    stream, _ = half_read(server)
    assert metrics(server).sent_microbatches == sent + 1
    stream.cancel()  # which may count the message that gRPC holds as sent
    assert server.server.streams.wait_until_idle(TIMEOUT_S)
    before, text = readings(server)
    found = {
        (sample.name.removeprefix("disttrain_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found[("prepared_microbatches_total",)] == before.prepared_microbatches > 0
    assert found[("sent_microbatches_total",)] == before.sent_microbatches > sent
    assert found[("sent_bytes_total",)] == before.sent_bytes > 0
    assert found[("read_bytes_total", "shards")] == before.shard_read_bytes > 0
    assert found[("decoded_images_total", "invalid")] == before.invalid_images > 0
    assert found[("decoded_images_total", "valid")] == before.decoded_images - before.invalid_images
    assert found[("plan_seconds_count",)] == sum(entry.plans for entry in before.plan_times) > 0
    assert found[("plan_seconds_sum",)] == pytest.approx(before.planning_time.ToNanoseconds() / 1e9)
    assert found[("known_jobs",)] == before.known_jobs == 1
    assert [found[("cached_job_bytes", kind)] for kind in ("jobs", "tables", "windows", "plans")] == [
        before.cached.jobs,
        before.cached.tables,
        before.cached.windows,
        before.cached.plans,
    ]
    for stage in ("planning", "decoding", "consumer", "memory"):
        assert found[("waited_seconds_total", stage)] == pytest.approx(
            getattr(before.waits, stage).ToNanoseconds() / 1e9
        ), stage
    assert before.resident_bytes > 1 << 20
    assert before.uptime.ToNanoseconds() > 0


@contextmanager
def mute() -> Iterator[str]:
    """An address where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


class Liar(AdminServiceServicer):
    """Says what a broken or hostile server might."""

    def __init__(self) -> None:
        self.calls = 0

    def GetMetrics(self, _request: Any, _context: Any) -> pb.GetMetricsResponse:  # noqa: N802
        self.calls += 1
        rank = pb.RankProgress(job="\x1b[2J[red]", module="m\n" * 500, rank=2**32 - 1, step=2**64 - 1)
        return pb.GetMetricsResponse(
            uptime=Duration(seconds=-(2**62) if self.calls == 1 else 2**62),
            decoded_images=2**64 - self.calls,
            sent_bytes=5 - self.calls,
            waits=pb.StageWaits(decoding=Duration(seconds=-5)),
            ranks=[rank] * 1000,
        )


class Stranger(grpc.GenericRpcHandler):
    """Another program, which answers every call with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def service(self, _details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda _request, _context: self._answer)


@contextmanager
def grpc_server(servicer: AdminServiceServicer | Stranger | None) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    if isinstance(servicer, Stranger):
        server.add_generic_rpc_handlers((servicer,))
    elif servicer is not None:
        add_AdminServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_servers_that_do_not_answer_are_shown_as_such(server: Running) -> None:
    (closed,) = free_addresses(1)
    with mute() as silent, grpc_server(None) as other:
        done = run("top", f"{silent},{closed}", other, server.address, *ONCE)
    assert done.returncode == 0
    ends = {row[0]: " ".join(row[11:]) for row in rows(done.stdout) if row and ":" in row[0]}
    assert ends[silent] == ends[closed] == "does not answer"
    assert ends[other] == "no server of this release"
    assert ends[server.address] == "0.0 -", "its memory is two words; nothing failed, and no stream waited"


@pytest.mark.parametrize("answer", [b"\xff\xff\xff\xff no message", b""])
def test_another_program_is_named_as_such_without_a_traceback(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with grpc_server(Stranger(answer)) as address:
        done = run("top", address, *ONCE)
    (row,) = [row for row in rows(done.stdout) if row[:1] == [address]]
    assert " ".join(row[11:]) == "no server of this release"
    assert not caplog.records, "what is logged goes to stderr, and so onto the screen"
    assert "Traceback" not in done.stderr


def test_what_a_broken_server_says_is_shown_without_harm() -> None:
    with grpc_server(Liar()) as address:
        done = run("top", address, *ONCE)
    assert done.returncode == 0
    assert "\x1b[2J" not in done.stdout
    assert "952 more ranks are less far behind" in " ".join(done.stdout.split())


def message(uptime_s: int, **fields: Any) -> pb.GetMetricsResponse:
    return pb.GetMetricsResponse(uptime=Duration(seconds=uptime_s), **fields)


def test_rates_are_taken_between_two_answers_of_one_process() -> None:
    before, now = message(10, decoded_images=100, sent_bytes=0), message(14, decoded_images=500, sent_bytes=6_000_000)
    assert numbers.rates(now, numbers.answered("a", now, before).before) == ("100", "1.5")
    assert numbers.answered("a", before, now).before is None, "it was started again"
    assert numbers.rates(now, None) == ("-", "-")


def test_the_stage_that_limits_is_the_one_waited_for_most_since_the_last_answer() -> None:
    def waits(planning: int, decoding: int, consumer: int, memory: int) -> pb.StageWaits:
        return pb.StageWaits(
            planning=Duration(seconds=planning),
            decoding=Duration(seconds=decoding),
            consumer=Duration(seconds=consumer),
            memory=Duration(seconds=memory),
        )

    before, now = message(1, waits=waits(90, 5, 0, 0)), message(9, waits=waits(91, 8, 0, 99))
    assert numbers.slowest_stage(now, before) == "decoding 75%"
    assert numbers.slowest_stage(now, None) == "planning 92%"
    assert numbers.slowest_stage(before, before) == "-"


def test_lag_is_counted_from_the_first_rank_of_the_module_on_any_server() -> None:
    """What lies in buffers does not count; encoders are ahead of the backbone."""

    def rank(job: str, rank: int, step: int | None, module: str = "llm") -> pb.RankProgress:
        return pb.RankProgress(job=job, module=module, rank=rank, sent_step=100 * rank, step=step)

    found = numbers.ranked(
        {
            "a": message(1, ranks=[rank("x", 0, 7), rank("y", 0, 90)]),
            "b": message(
                1, ranks=[rank("x", 1, 4), rank("x", 2, None), rank("x", 0, 13, "vit"), rank("x", 1, 12, "vit")]
            ),
        }
    )
    assert [(row.address, row.progress.job, row.progress.rank, row.lag) for row in found] == [
        ("a", "x", 0, 0),
        ("b", "x", 1, 3),
        ("b", "x", 2, None),
        ("b", "x", 0, 0),
        ("b", "x", 1, 1),
        ("a", "y", 0, 0),
    ]


def test_of_many_ranks_those_furthest_behind_are_shown() -> None:
    ranks = [pb.RankProgress(job="x", module="m", rank=r, step=1000 - r % 100) for r in range(200)]
    shown = numbers.most_behind(numbers.ranked({"a": message(1, ranks=ranks)}))
    assert len(shown) == numbers.MAX_RANKS_SHOWN
    assert min(row.lag or 0 for row in shown) == 100 - numbers.MAX_RANKS_SHOWN // 2
    assert [row.progress.rank for row in shown] == sorted(row.progress.rank for row in shown)
    assert "152 more ranks" in " ".join(drawn([numbers.answered("a", message(2, ranks=ranks), None)], 110))


def drawn(
    answers: list[numbers.Answer], width: int, height: int | None = None, failed: Sequence[Failed] = ()
) -> list[str]:
    """The lines of the tables on a terminal of that size."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(fleet_tables(answers, width, height, failed))
    return capture.get().splitlines()


def fleet(live: int, silent: int, host: str = "127.0.0.1", ranks: int = 4) -> list[numbers.Answer]:
    """Servers that do not answer, then those that do; the last of each job's ranks is furthest behind."""
    found = [numbers.Answer(f"{host}:{40000 + i}", problem=DOES_NOT_ANSWER) for i in range(silent)]
    before = message(10, waits=pb.StageWaits())
    now = message(
        12,
        decoded_images=246_802,
        sent_bytes=312_000_000,
        resident_bytes=451 << 20,
        prefetch_used_bytes=37,
        prefetch_limit_bytes=100,
        invalid_images=54_321,
        storage_errors=987,
        direct_fallbacks=321,
        waits=pb.StageWaits(consumer=Duration(seconds=9)),
        ranks=[pb.RankProgress(job="eabb7b144187", module="backbone", rank=r, step=5000 - 7 * r) for r in range(ranks)],
    )
    return found + [numbers.answered(f"{host}:{50000 + i}", now, before) for i in range(live)]


def cells(line: str, head: str) -> dict[str, str]:
    """What is below each title; columns are two characters apart, and figures end where their titles do."""
    ends = {found[0]: (found.start(), found.end()) for found in re.finditer(r"\S+", head)}
    return {
        title: next(word[0] for word in re.finditer(r"\S+( \S+)*", line) if word.start() < end and word.end() > start)
        for title, (start, end) in ends.items()
    }


SERVER = {
    "images/s": "123401", "MB/s": "156.0", "streams": "0", "memory": "451 MiB", "ahead": "37%", "invalid": "54321",
    "storage": "987", "fallbacks": "321", "state": "consumer 100%",
}  # fmt: skip
RANK = {"job": "eabb7b144187", "module": "backbone", "rank": "3", "step": "4979", "lag": "21", "unread": "0.0 s"}
RANK["ready"] = "0"


@pytest.mark.parametrize("host", ["127.0.0.1", "cpu-17.rack-4.europe-west.example.com"])
@pytest.mark.parametrize("width", [24, 30, 40, 50, 60, 70, 80, 100, 110, 160])
def test_no_figure_is_cut_and_columns_are_left_out_whole(width: int, host: str) -> None:
    lines = drawn(fleet(2, 2, host), width)
    assert max(map(len, lines)) <= width
    servers, ranks = (i for i, line in enumerate(lines) if re.search(r"^server  |^(job +)?module +rank", line))
    text = " ".join(" ".join(lines).split())
    for head, row, whole in ((servers, servers + 5, SERVER), (ranks, ranks + 8, RANK)):
        found = cells(lines[row], lines[head])
        assert all(found[title] == cell for title, cell in whole.items() if title in found)
        left_out = [title for title in whole if title not in found]
        assert "wider terminals show" in text or not left_out
        assert all(re.search(rf"wider terminals show: [^.]*{title}", text) for title in left_out), left_out
    addresses = [cells(line, lines[servers])["server"] for line in lines[servers + 2 : servers + 6]]
    assert len(set(addresses)) == 4, "servers differ"


def test_what_a_narrow_terminal_keeps() -> None:
    lines = drawn(fleet(1, 1), 40)
    assert lines[0].split() == ["server", "images/s", "state"]
    assert lines[2].split() == ["127.0.*:40000", "-", "does", "not", "answer"]
    lines = drawn(fleet(1, 1), 80)
    head = next(line for line in lines if line.startswith("job"))
    assert cells(lines[lines.index(head) + 2], head)["server"] == "127.0.0.1:50000"


def test_more_servers_than_lines_are_counted_and_ranks_keep_some() -> None:
    answers = fleet(1, 31, ranks=30)
    lines = drawn(answers, 110, 24)
    assert len(lines) <= 24
    assert any(line.startswith("127.0.0.1:50000") for line in lines), "the one that answers comes first"
    silent = sum(line.endswith("does not answer") for line in map(str.rstrip, lines))
    assert silent >= 5
    assert f"... and {31 - silent} more servers ({31 - silent} do not answer)" in lines
    ranks = [line.split()[2] for line in lines if line.startswith("eabb7b144187")]
    assert len(ranks) >= 4
    assert ranks == [str(rank) for rank in range(30 - len(ranks), 30)], "those that lag most"
    assert f"... and {30 - len(ranks)} more ranks are less far behind" in lines
    everything = drawn(answers, 110)
    assert sum(bool(re.match("127.0.0.1:", line)) for line in everything) == 32
    assert not any("... and" in line for line in everything)


@pytest.mark.parametrize("height", range(7, 60))
def test_nothing_is_below_the_last_line(height: int) -> None:
    lines = drawn(fleet(3, 8), 80, height)
    assert len(lines) <= height
    assert any(line.startswith("127.0.*50000") for line in lines)
    servers, ranks = (sum(line.startswith(start) for line in lines) for start in ("127.0.*", "eabb7b144187"))
    text = "\n".join(lines)
    assert servers == 11 or f"... and {11 - servers} more server" in text
    assert ranks == 12 or re.search(rf"\.\.\. and {12 - ranks}( more)? rank", text)


@pytest.mark.parametrize("height", [9, 14, 20, 30, 45, 90, None])
def test_failures_leave_servers_and_ranks_their_lines_and_are_counted(height: int | None) -> None:
    failed = [
        Failed(
            "image", "laion", f"{n:05}.tar", f"k{n}", 1, 10**9 - n, "it is \x1b[2J broken", ("a:1", "b:1")[: 1 + n % 2]
        )
        for n in range(60)
    ]
    lines = drawn(fleet(2, 2), 120, height, failed)
    assert height is None or len(lines) <= height
    shown = [line.split()[3] for line in lines if line.startswith("image")]
    assert shown == [f"k{n}" for n in range(len(shown))], "the newest"
    is_small = height is not None and height < 20
    assert len(shown) == 48 if height in (None, 90) else is_small or 0 < len(shown) < 48
    assert f"... and {60 - len(shown)} more samples or shards failed lately" in lines
    assert any(line.startswith("127.0.0.1:50000") for line in lines)
    assert height == 9 or any(line.startswith("eabb7b144187") for line in lines)
    assert not any("\x1b" in line for line in lines)
    assert is_small or any("2 servers" in line for line in lines)


def test_counters_that_fell_are_those_of_another_process() -> None:
    class Restarted(AdminServiceServicer):
        calls = 0

        def GetMetrics(self, _request: Any, _context: Any) -> pb.GetMetricsResponse:  # noqa: N802
            self.calls += 1
            return message(self.calls, decoded_images=9000 if self.calls == 1 else self.calls)

    with grpc_server(Restarted()) as address, grpc.insecure_channel(address) as channel:
        fleet = Fleet({address: channel})
        found = [fleet.look()[0] for _ in range(3)]
    shown = [numbers.rates(answer.now, answer.before)[0] for answer in found if answer.now]
    assert shown == ["-", "-", "1"]


@pytest.mark.parametrize(
    ("arguments", "message_"),
    [
        (("--once",), "0 servers are named"),
        (("host",), "a server is 'host'; HOST:PORT"),
        (("h:1", "--once", "--interval-s", "0"), "--interval-s is 0.0; 0.1 to 3600"),
        (("h:1", "--once", "--interval-s", "nan"), "--interval-s is nan"),
        (tuple(f"h:{port}" for port in range(300)), "300 servers are named"),
        (("h:1",), "add --once"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message_: str) -> None:
    assert message_ in refused("top", *arguments)


@contextmanager
def on_a_terminal(*arguments: str, term: str = "xterm") -> Iterator[tuple[subprocess.Popen[bytes], bytearray]]:
    """`dataserver top` on a terminal of its own, and what it has written there."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "120", "LINES": "40"}
    line = command("top", *arguments)
    with subprocess.Popen(line, stdout=follower, stderr=follower, stdin=follower, env=environment) as process:
        os.close(follower)
        shown = bytearray()
        reading = threading.Thread(target=read_all, args=(leader, shown))
        reading.start()
        try:
            yield process, shown
        finally:
            process.kill()
            reading.join()
            os.close(leader)


def ended_by(number: int, address: str) -> tuple[int, bytes]:
    """Exit code and output of a live view that had a signal."""
    with on_a_terminal(address, "--interval-s", "0.2") as (process, shown):
        end = time.monotonic() + TIMEOUT_S
        while not re.search(rb"images/s", shown):
            assert time.monotonic() < end, bytes(shown)
            time.sleep(0.05)
        process.send_signal(number)
        code = process.wait(TIMEOUT_S)
    return code, bytes(shown)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_in_order(server: Running, number: int, code: int) -> None:
    ended, shown = ended_by(number, server.address)
    assert ended == code
    assert b"Traceback" not in shown
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1, "the screen is as it was"


def test_a_terminal_without_a_cursor_is_refused() -> None:
    with on_a_terminal("127.0.0.1:1", term="dumb") as (process, shown):
        assert process.wait(TIMEOUT_S) == 2
    assert b"add --once" in shown


def read_all(descriptor: int, into: bytearray) -> None:
    while True:
        try:
            into += os.read(descriptor, 4096)
        except OSError:  # the other side is closed
            return
