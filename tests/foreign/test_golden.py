"""The golden transcript: this code's servers answer as it says, and every client reads it as it says."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.errors_pb2 import ErrorAction
from disttrain.v1.microbatch_pb2 import VALIDITY_INVALID, MicrobatchHeader
from foreign import node
from foreign.replay import replaying
from golden.dataset import BROKEN, MERGE, PATCH, pixels
from golden.transcript import FOLDER, VIEWS, Exchange, load, record, save, tensor_bytes
from google.protobuf.json_format import MessageToDict, ParseDict

GOLDEN = load()
BY_NAME = {exchange.name: exchange for exchange in GOLDEN}
STREAMS = [exchange.name for exchange in GOLDEN if exchange.method == "StreamMicrobatches" and not exchange.details]


@pytest.fixture(scope="module")
def answered() -> dict[str, Exchange]:
    """What a server of this code answers."""
    return {exchange.name: exchange for exchange in record()}


def test_the_same_is_asked(answered: dict[str, Exchange]) -> None:
    assert [(e.name, e.method, e.request, e.state, e.variable) for e in answered.values()] == [
        (e.name, e.method, e.request, e.state, e.variable) for e in GOLDEN
    ]


@pytest.mark.parametrize("name", [name for name in BY_NAME if not name.endswith("zstd")])
def test_servers_answer_as_ever(answered: dict[str, Exchange], name: str) -> None:
    found, golden = answered[name], BY_NAME[name]
    assert found.answers == golden.answers
    assert found.error == golden.error
    assert found.frames == golden.frames


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.endswith("zstd")])
def test_servers_compress_the_same(answered: dict[str, Exchange], name: str) -> None:
    """Versions of zstd make other frames of the same bytes."""
    raw = BY_NAME[name.removesuffix("_zstd")]
    assert answered[name].hashes() == BY_NAME[name].hashes() == raw.hashes()
    for exchange in (answered[name], BY_NAME[name]):
        headers = [header for header, _ in exchange.microbatches]
        assert any(tensor.codec in exchange.request.accepted_codecs for header in headers for tensor in header.tensors)
        assert [simplified(header) for header in headers] == [simplified(header) for header, _ in raw.microbatches]


def test_payloads_on_data_connections_are_those_of_chunks() -> None:
    direct, chunks = BY_NAME["stream_vit_0_direct"], BY_NAME["stream_vit_0"]
    assert [*direct.microbatches] == [*chunks.microbatches]
    assert all(message.direct == (message.header.total_bytes > 0) for message in direct.answers)


def simplified(header: MicrobatchHeader) -> MicrobatchHeader:
    """Without what depends on the codec."""
    found = MicrobatchHeader()
    found.CopyFrom(header)
    for name in ("tensors", "total_bytes", "crc32c"):
        found.ClearField(name)
    return found


@pytest.mark.parametrize("name", STREAMS)
def test_files_list_the_hashes_of_their_bytes(name: str) -> None:
    (path,) = FOLDER.glob(f"*_{name}.json")
    found = json.loads(path.read_text())
    assert found["sha256"] == BY_NAME[name].hashes()
    ends = [message["end"] for message in found["answer"] if "end" in message]
    assert ends == [{"reason": "REASON_END_OF_JOB", "next_step": "3"}]
    headers = [ParseDict(m["header"], MicrobatchHeader()) for m in found["answer"] if "header" in m]
    assert headers == [header for header, _ in BY_NAME[name].microbatches]


def test_a_saved_transcript_is_the_one_that_was_recorded(tmp_path: Path) -> None:
    save(GOLDEN, tmp_path)
    names = {path.name for path in FOLDER.iterdir()} - {"README.md"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()


def test_every_action_occurs() -> None:
    every = {name.removeprefix("ERROR_ACTION_") for name in ErrorAction.DESCRIPTOR.values_by_name} - {"UNSPECIFIED"}
    assert {exchange.error["action"] for exchange in GOLDEN if exchange.details} == every


def test_patches_are_the_pixels_in_the_order_that_the_protos_describe() -> None:
    checked = broken = 0
    for header, body in BY_NAME["stream_vit_0"].microbatches:
        encoded = {tensor.name: tensor_bytes(tensor, body) for tensor in header.tensors}
        patches = np.frombuffer(encoded["patches"], "u1").reshape(-1, PATCH * PATCH * 3)
        bounds = np.frombuffer(encoded["cu_patches"], "<i4")
        items = zip(header.items.dataset, header.items.sample, header.items.validity, strict=True)
        for place, (dataset, sample, validity) in enumerate(items):
            if dataset != 0:
                continue
            number = (sample >> 32) * 8 + sample % 2**32
            image = pixels(number) * (number != BROKEN)
            rows, columns = (side // PATCH for side in image.shape[:2])
            blocks = image.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
            expected = blocks.transpose(0, 3, 1, 4, 2, 5, 6).reshape(rows * columns, -1)
            first, end = bounds[place : place + 2]
            assert np.array_equal(patches[first:end], expected)
            assert (validity == VALIDITY_INVALID) == (number == BROKEN)
            checked += 1
            broken += number == BROKEN
    assert checked > 2
    assert broken == 1


def header_of(line: node.Line) -> MicrobatchHeader:
    """The header that the client in JavaScript printed."""
    header = line["header"]
    plan_hash = base64.b64encode(bytes.fromhex(header["plan_hash"])).decode()
    return ParseDict({**header, "plan_hash": plan_hash}, MicrobatchHeader())


@pytest.mark.usefixtures("javascript")
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_the_client_in_javascript_reads_the_transcript(tmp_path: Path, codec: str) -> None:
    job = tmp_path / "job.json"
    job.write_text(BY_NAME["create_incomplete"].request.job_spec_json)
    suffix = "_zstd" if codec == "zstd" else ""
    with replaying(GOLDEN) as address:
        for module, rank in VIEWS:
            golden = BY_NAME.get(f"stream_{module}_{rank}{suffix}")
            if golden is None:
                continue
            read = node.read([address], job, "--codec", codec, "--module", module, "--rank", str(rank))
            assert [line["sha256"] for line in read.lines] == golden.hashes()
            assert [header_of(line) for line in read.lines] == [header for header, _ in golden.microbatches]
    (created,) = BY_NAME["create_incomplete"].answers
    assert isinstance(created, pb.GetOrCreateJobResponse)
    assert read.job["spec"] == created.canonical_job_spec_json
    assert [f["path"] for f in read.job["filled"]] == [filled.path for filled in created.filled]


DESCRIBE = """
    const one = new client.DataClient([value.address]);
    return one.call('DescribeSamples', value.request).finally(() => one.close());
"""


@pytest.mark.usefixtures("javascript")
def test_the_client_in_javascript_loses_no_bit_of_large_integers() -> None:
    golden = BY_NAME["describe_samples"]
    large = pb.DescribeSamplesResponse(samples=[pb.SampleDescription(sample=2**64 - 1)])
    other = pb.DescribeSamplesRequest(dataset="pairs", samples=[2**63 + 1])
    answer = Exchange("", "DescribeSamples", other, messages=[large.SerializeToString()])
    with replaying([BY_NAME["server_info"], golden, answer]) as address:
        request = MessageToDict(golden.request, preserving_proto_field_name=True)
        found = node.evaluate(DESCRIBE, {"address": address, "request": request})
        beyond = node.evaluate(
            DESCRIBE, {"address": address, "request": {"dataset": "pairs", "samples": [str(2**63 + 1)]}}
        )
    columns = {column["name"]: column["integer"] for column in found["samples"][0]["columns"] if "integer" in column}
    assert columns["hash"] == str(2**53 + 21)
    assert beyond["samples"][0]["sample"] == str(2**64 - 1)


ERRORS = """
    const { dataError } = require(value.protocol);
    return value.errors.map(([code, encoded]) => {
        const details = encoded && Buffer.from(encoded, 'base64');
        const metadata = { get: (key) => (key === 'grpc-status-details-bin' && details ? [details] : []) };
        const { action, reason } = dataError({ code, details: 'it says', metadata }, 'a:1');
        return [action, reason];
    });
"""
OF_GRPC = {14: "RETRY", 4: "RETRY", 13: "RETRY", 12: "ANOTHER_SERVER", 3: "GIVE_UP", 16: "GIVE_UP"}
"""What to do about errors of gRPC itself."""
ERRORS_OF_SERVERS = [exchange.name for exchange in GOLDEN if exchange.details]
Understood = dict[int | str, tuple[str, str]]


@pytest.fixture(scope="module")
def understood(javascript: None) -> Understood:
    """Action and reason that the client in JavaScript takes from each error, in one process."""
    errors = [(2, base64.b64encode(BY_NAME[name].details).decode()) for name in ERRORS_OF_SERVERS]
    asked = [*errors, *((code, "") for code in OF_GRPC)]
    found = node.evaluate(ERRORS, {"protocol": str(node.CLIENT / "protocol.js"), "errors": asked})
    return dict(zip([*ERRORS_OF_SERVERS, *OF_GRPC], map(tuple, found), strict=True))


@pytest.mark.parametrize("name", ERRORS_OF_SERVERS)
def test_the_client_in_javascript_understands_errors(understood: Understood, name: str) -> None:
    golden = BY_NAME[name]
    assert understood[name] == (golden.error["action"], golden.error["reason"])


@pytest.mark.parametrize("code", OF_GRPC)
def test_the_client_in_javascript_understands_errors_of_grpc_itself(understood: Understood, code: int) -> None:
    assert understood[code] == (OF_GRPC[code], "")
