"""The client in JavaScript survives what servers survive, and does what errors ask for."""

import base64
import json
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
import zstandard
from cli.server_process import ServerProcess, serving
from crc32c import crc32c as crc32c_of
from disttrain.v1.data_service_pb2 import EndOfStream, StreamMicrobatchesRequest, StreamMicrobatchesResponse
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from e2e.streams import dataset_flags
from foreign import node
from foreign.conftest import Case
from foreign.proxy import Messages, proxy
from serving.harness import TIMEOUT_S, index
from shards import write_pairs

pytestmark = pytest.mark.usefixtures("javascript")
VIEW = ("vit", 0)
FLAGS = ("--module", "vit", "--rank", "0")
Two = tuple[ServerProcess, ServerProcess]


@pytest.fixture(scope="module")
def servers(case: Case) -> Iterator[Two]:
    """For tests that do nothing to them."""
    with serving(*case.flags) as one, serving(*case.flags) as other:
        yield one, other


@pytest.fixture
def mortal(case: Case) -> Iterator[Two]:
    """For one test alone; neither knows a job."""
    with serving(*case.flags) as one, serving(*case.flags) as other:
        yield one, other


def contents(lines: Iterable[node.Line]) -> list[object]:
    """In the order in which they came: neither gap nor repeat goes unnoticed."""
    return [*map(node.content, lines)]


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, marks=pytest.mark.long, id="kill -9"), pytest.param(signal.SIGTERM, id="drain")],
)
def test_a_lost_server_costs_nothing(case: Case, mortal: Two, tmp_path: Path, number: int) -> None:
    # The second server learns the job (JOB_UNKNOWN) when the stream comes to it.
    addresses = [server.address for server in mortal]
    with node.reading(addresses, case.complete(tmp_path), *FLAGS) as lines:
        next(lines)
        taken = [*islice(lines, 5)]
        assert {line["server"] for line in taken} == {addresses[0]}
        mortal[0].process.send_signal(number)
        taken += lines
    assert contents(taken) == contents(case.undisturbed.view(*VIEW))
    assert {line["server"] for line in taken} == set(addresses)


def test_all_ranks_survive_a_kill(case: Case, mortal: Two) -> None:
    addresses = [server.address for server in mortal]
    with node.reading(addresses, case.job) as lines:
        job = next(lines)["job"]
        taken = [*islice(lines, 20)]
        mortal[1].end(signal.SIGKILL)
        read = node.Read(job, [*taken, *lines])
    for view in {(line["module"], line["rank"]) for line in case.undisturbed.lines}:
        assert contents(read.view(*view)) == contents(case.undisturbed.view(*view))


@pytest.mark.long
def test_a_restarted_server_gets_the_job_again(case: Case, tmp_path: Path) -> None:
    with serving(*case.flags) as first, node.reading([first.address], case.complete(tmp_path), *FLAGS) as lines:
        next(lines)
        taken = [*islice(lines, 5)]
        first.end(signal.SIGKILL)
        with serving(*case.flags, "--listen", first.address) as again:
            assert again.address == first.address
            taken += lines
    assert contents(taken) == contents(case.undisturbed.view(*VIEW))


@pytest.fixture(scope="module")
def misfit(tmp_path_factory: pytest.TempPathFactory, case: Case) -> Iterator[ServerProcess]:
    """A server whose pairs are others."""
    pairs = index(write_pairs(tmp_path_factory.mktemp("misfit") / "pairs", 20, 20, seed=9))
    with serving(*dataset_flags({**case.datasets, "pairs": pairs})) as found:
        yield found


def test_another_dataset_means_another_server(case: Case, misfit: ServerProcess, servers: Two, tmp_path: Path) -> None:
    odd = {misfit.address: "FAILED_PRECONDITION"}
    read = node.read([misfit.address, servers[0].address], case.complete(tmp_path), *FLAGS, odd=odd)
    assert read.servers() == {servers[0].address}
    assert contents(read.lines) == contents(case.undisturbed.view(*VIEW))


def test_a_fleet_that_refuses_is_quoted(case: Case, misfit: ServerProcess, tmp_path: Path) -> None:
    message = node.refused([misfit.address], case.complete(tmp_path))
    assert "every server refuses" in message
    assert misfit.address in message
    assert "FAILED_PRECONDITION" in message
    assert "pairs" in message


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"seq_len": "4096"}, "INVALID_ARGUMENT", "stream.seq_len"),
        ({"datasets": []}, "INVALID_ARGUMENT", "stream.datasets"),
        ({"sed": 1}, "FAILED_PRECONDITION", "stream.sed"),
    ],
)
def test_an_invalid_job_is_given_up(
    case: Case, misfit: ServerProcess, tmp_path: Path, change: dict[str, object], code: str, named: str
) -> None:
    data = json.loads(case.job.read_text())
    data["stream"] |= change
    job = tmp_path / "job.json"
    job.write_text(json.dumps(data))
    message = node.refused([misfit.address], job)
    assert code in message
    assert named in message


def test_an_unknown_module_is_given_up(case: Case, servers: Two) -> None:
    message = node.refused([server.address for server in servers], case.job, "--module", "vot", "--rank", "0")
    assert "INVALID_ARGUMENT" in message
    assert "vot" in message


def test_too_many_streams_mean_another_server_or_later(case: Case, servers: Two, tmp_path: Path) -> None:
    free = servers[0]
    with serving(*case.flags, "--max-streams", "1") as full:
        job_id = node.read([full.address], case.job, *FLAGS, "--steps", "1").job["job_id"]
        with grpc.insecure_channel(full.address) as channel:
            request = StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=1)
            held = DataServiceStub(channel).StreamMicrobatches(request, timeout=TIMEOUT_S)
            next(held)
            read = node.read([full.address, free.address], case.job, *FLAGS)
            message = node.refused([full.address], case.job, *FLAGS, "--give-up-ms", "500")
            held.cancel()
        assert read.servers() == {free.address}
        assert contents(read.lines) == contents(case.undisturbed.view(*VIEW))
        assert "no progress for 500 ms" in message
        assert "RESOURCE_EXHAUSTED" in message


def test_nobody_listens(case: Case) -> None:
    message = node.refused(["127.0.0.1:1"], case.job, "--give-up-ms", "500")
    assert "no progress for 500 ms" in message
    assert "UNAVAILABLE" in message


class Once:
    """Changes one message of the first stream that has it."""

    def __init__(self, number: int, kind: str) -> None:
        self.number = number
        self.kind = kind
        self.done = False

    def __call__(self, messages: Messages) -> Messages:
        for number, message in enumerate(messages):
            if self.done or number < self.number or message.WhichOneof("message") not in {"chunk", self.kind}:
                yield message
            elif message.WhichOneof("message") == "chunk" and self.kind != "header":
                self.done = True
                if self.kind == "cut":
                    return
                chunk = bytearray(message.chunk)
                chunk[len(chunk) // 2] ^= 1
                message.chunk = bytes(chunk)
                yield message
            elif message.WhichOneof("message") == "header":
                self.done = True
                message.header.plan_hash = bytes(32)
                yield message
            else:
                yield message


@pytest.mark.parametrize("kind", ["chunk", "cut"])
def test_bytes_that_change_or_end_on_the_way_are_asked_for_again(case: Case, servers: Two, kind: str) -> None:
    change = Once(6, kind)
    with proxy(servers[0].address, change) as address:
        read = node.read([address], case.job, *FLAGS)
    assert change.done
    assert contents(read.lines) == contents(case.undisturbed.view(*VIEW))


def test_two_plans_of_a_step_end_the_run(case: Case, servers: Two) -> None:
    change = Once(2, "header")
    with proxy(servers[0].address, change) as address:
        message = node.refused([address, servers[1].address], case.job, *FLAGS)
    assert change.done
    assert "step 0 has the plans" in message


def test_views_of_two_modules_must_come_from_one_plan(case: Case, servers: Two) -> None:
    def change(messages: Messages) -> Messages:
        for message in messages:
            if message.header.items.image:
                message.header.plan_hash = bytes(32)
            yield message

    with proxy(servers[0].address, change) as address:
        assert "step 0 has the plans" in node.refused([address], case.job)


def test_a_server_that_decodes_differently_is_passed_over_and_named(case: Case, servers: Two) -> None:
    change = Once(6, "cut")
    with proxy(servers[0].address, change) as used, proxy(servers[1].address, digest="other") as odd:
        read = node.read([used, odd], case.job, *FLAGS, odd={odd: "decode images differently"})
    assert change.done
    assert read.servers() == {used}
    assert contents(read.lines) == contents(case.undisturbed.view(*VIEW))


def test_servers_that_decode_clips_or_videos_differently_are_told_of() -> None:
    """Once bytes of that kind were used; a server that has none of it is not asked."""
    script = """
const { DataClient } = require(process.argv[1]);
const client = new DataClient(['127.0.0.1:1']);
const said = [];
for (const [address, audio, video, sound, of, content] of JSON.parse(process.argv[2])) {
  try {
    const digests = { audio_digest: audio, video_digest: video, sound_digest: sound };
    client.commit({ address }, { content_digest: content ?? 'c', ...digests }, of);
    said.push('');
  } catch (error) {
    said.push(`${error.action}: ${error.message}`);
  }
}
client.close();
console.log(JSON.stringify(said));
"""
    used = [
        ["one", "a", "v", "s", ""], ["two", "b", "w", "t", ""], ["odd", "b", "w", "t", "audio", "d"],
        ["one", "a", "v", "s", "audio"], ["two", "", "w", "", ""], ["two", "b", "w", "s", ""],
        ["two", "a", "w", "t", ""], ["two", "a", "w", "s", "video"], ["one", "a", "v", "s", "audio"],
    ]  # fmt: skip
    command = ["node", "-e", script, str(node.CLIENT / "client.js"), json.dumps(used)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert json.loads(done.stdout) == [
        "", "", "ANOTHER_SERVER: one and odd decode images differently",
        "", "", "ANOTHER_SERVER: one and two decode audio differently",
        "ANOTHER_SERVER: one and two decode sound differently", "",
        "ANOTHER_SERVER: two and one decode video differently",
    ]  # fmt: skip


class Idle:
    """Ends two streams as idle: the first where its third header is due, the second after that header."""

    def __init__(self) -> None:
        self.ended = 0

    def __call__(self, messages: Messages) -> Messages:
        headers = 0
        for message in messages:
            headers += message.WhichOneof("message") == "header"
            if headers < 3 or self.ended == 2:
                yield message
                continue
            self.ended += 1
            if self.ended == 2:
                yield message
            place = {"next_step": message.header.step, "next_microbatch": message.header.microbatch}
            yield StreamMicrobatchesResponse(end=EndOfStream(reason=EndOfStream.REASON_IDLE, **place))
            return


def test_a_stream_that_ended_as_idle_is_asked_for_again(case: Case, servers: Two) -> None:
    change = Idle()
    with proxy(servers[0].address, change) as address:
        read = node.read([address], case.job, *FLAGS)
    assert change.ended == 2
    assert contents(read.lines) == contents(case.undisturbed.view(*VIEW))


READ = """
    const one = new client.DataClient([value.address], { idleMs: 2000 });
    const read = async () => {
        await one.createJob(value.job);
        const places = [];
        for await (const { header } of one.stream('vit', 0)) places.push([Number(header.step), header.microbatch]);
        return places;
    };
    return read().finally(() => one.close());
"""


def test_a_stream_that_falls_silent_is_asked_for_again(case: Case, servers: Two) -> None:
    silent, over = Event(), Event()

    def change(messages: Messages) -> Messages:
        for number, message in enumerate(messages):
            if number == 4 and not silent.is_set():
                silent.set()
                over.wait(TIMEOUT_S)
            yield message

    with proxy(servers[0].address, change) as address:
        try:
            places = node.evaluate(READ, {"address": address, "job": case.job.read_text()})
        finally:
            over.set()
    assert silent.is_set()
    assert places == [
        [int(line["header"]["step"]), line["header"]["microbatch"]] for line in case.undisturbed.view(*VIEW)
    ]


def test_without_node_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match=r"node is missing: Node\.js 20"):
        node.require_node()


BODY = bytes(range(200))
DECODE = """
    return value.map(({ header, chunks }) => {
        try {
            const { t } = client.decode(header, chunks.map((chunk) => Buffer.from(chunk, 'base64')));
            return { values: Array.from(t, String), shape: t.shape, type: t.constructor.name };
        } catch (error) {
            return { action: error.action, message: error.message };
        }
    });
"""
Asked = dict[str, object]


def asked(chunks: list[bytes], crc: int | None = None, total: int | None = None, **tensor: object) -> Asked:
    """A microbatch of one tensor `t`."""
    body = b"".join(chunks)
    entry = {"name": "t", "dtype": "DATA_TYPE_UINT8", "shape": ["200"], "offset": "0", "encoded_bytes": "200"}
    header = {
        "total_bytes": str(len(body) if total is None else total),
        "crc32c": crc32c_of(body) if crc is None else crc,
        "tensors": [{**entry, "raw_bytes": "200", "codec": "CODEC_RAW", **tensor}],
    }
    return {"header": header, "chunks": [base64.b64encode(c).decode() for c in chunks]}


def decoded(microbatches: Sequence[Asked]) -> list[Asked]:
    """What the client makes of each of these, in one process."""
    found: list[Asked] = node.evaluate(DECODE, list(microbatches))
    assert len(found) == len(microbatches)
    return found


def test_decoding_takes_every_type_and_codec() -> None:
    numbers = np.frombuffer(BODY, "<i4")
    large = np.array([2**63 - 1, -(2**53) - 1], "<i8").tobytes()
    sizes = {"shape": ["2"], "encoded_bytes": "16", "raw_bytes": "16"}
    packed = zstandard.compress(BODY)
    whole, small, wide, unpacked = decoded(
        [
            asked([BODY[:77], BODY[77:]]),
            asked([BODY], dtype="DATA_TYPE_INT32", shape=["25", "2"]),
            asked([large], dtype="DATA_TYPE_INT64", **sizes),
            asked([packed], codec="CODEC_ZSTD", encoded_bytes=str(len(packed))),
        ]
    )
    assert whole == {"values": [*map(str, BODY)], "shape": [200], "type": "Uint8Array"}
    assert small["values"] == [*map(str, numbers)]
    assert wide["values"] == [str(2**63 - 1), str(-(2**53) - 1)]
    assert unpacked["values"] == [*map(str, BODY)]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"crc": 1}, "RETRY", "CRC-32C"),
    ({"total": 201}, "RETRY", "200 of 201 bytes"),
    ({"total": 199}, "RETRY", "more bytes than the 199"),
    ({"shape": ["201"]}, "ANOTHER_SERVER", "wrong size"),
    ({"dtype": "DATA_TYPE_UNSPECIFIED"}, "ANOTHER_SERVER", "unknown type"),
    ({"offset": "64"}, "ANOTHER_SERVER", "outside"),
    ({"codec": "CODEC_UNSPECIFIED"}, "ANOTHER_SERVER", "CODEC_UNSPECIFIED"),
    ({"codec": "CODEC_ZSTD"}, "ANOTHER_SERVER", "no zstd frame"),
    ({"encoded_bytes": "64"}, "ANOTHER_SERVER", "64 bytes, 200 were announced"),
]
"""Changes of a sound microbatch, what the client does then, and what it says."""


@pytest.fixture(scope="module")
def refusals(javascript: None) -> list[Asked]:
    """What the client makes of all of them."""
    return decoded([asked([BODY], **changes) for changes, _, _ in REFUSED])


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[message for _, _, message in REFUSED])
def test_decoding_refuses(refusals: list[Asked], number: int) -> None:
    _, action, message = REFUSED[number]
    assert refusals[number]["action"] == action
    assert message in str(refusals[number]["message"])
