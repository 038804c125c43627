"""DescribeSamples: what stands behind sample numbers."""

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from disttrain.v1 import data_service_pb2 as pb
from serving.harness import TIMEOUT_S, Running, reason_of, running
from shards import make_image, write_tar

from dataserver.dataset.index.build import build_index

CODE = grpc.StatusCode


def describe(server: Running, samples: list[int], dataset: str = "d", fingerprint: str = "") -> list[Any]:
    request = pb.DescribeSamplesRequest(dataset=dataset, fingerprint=fingerprint, samples=samples)
    return list(server.stub.DescribeSamples(request, timeout=TIMEOUT_S).samples)


def refused(server: Running, *arguments: Any, **more: Any) -> tuple[grpc.StatusCode, str, str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        describe(server, *arguments, **more)
    return reason_of(caught.value)


def write(folder: Path, rows: list[dict[str, Any]], shard: str = "00000") -> Path:
    """A shard of images with .json members, indexed."""
    rng = np.random.Generator(np.random.Philox(1))
    members = []
    for number, row in enumerate(rows):
        key = f"{shard}{number:04d}"
        members += [(f"{key}.jpg", make_image(rng, 32, 32)), (f"{key}.json", json.dumps(row).encode())]
    write_tar(folder / f"{shard}.tar", members)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Values of all types, one row without, and a shard of more than one record batch."""
    root = tmp_path_factory.mktemp("described")
    big = 2**53 + 1
    write(root, [{"caption": "a", "id": big, "score": 0.5, "ok": True, "note": "x"}, {"caption": "b", "ok": False}])
    write(root, [{"caption": "c", "id": n} for n in range(300)], "00001")
    build_index(root, workers=1)
    return root


def test_shard_key_and_typed_columns(folder: Path) -> None:
    with running({"d": folder}) as server:
        first, second = describe(server, [0, 1])
    assert (first.sample, first.shard, first.key) == (0, "00000.tar", "000000000")
    values = {c.name: (c.WhichOneof("value"), getattr(c, c.WhichOneof("value"))) for c in first.columns}
    assert values == {
        "id": ("integer", 2**53 + 1),
        "score": ("number", 0.5),
        "ok": ("boolean", True),
        "note": ("text", "x"),
    }
    assert [(c.name, c.boolean) for c in second.columns] == [("ok", False)]


def test_order_repetition_and_other_shards(folder: Path) -> None:
    rows = [299, 0, 256, 255, 299]
    numbers = [1 << 32 | row for row in rows]
    with running({"d": folder}) as server:
        found = describe(server, [*numbers, 1])
        assert [s.sample for s in found] == [*numbers, 1]
        assert [s.key for s in found] == [*(f"00001{row:04d}" for row in rows), "000000001"]
        assert [s.columns[0].integer for s in found[:-1]] == rows
        assert describe(server, []) == []
        everything = [1 << 32 | row for row in range(300)] * 4
        assert len(describe(server, everything[:1024])) == 1024
        *status, text = refused(server, everything[:1025])
        assert status == [CODE.INVALID_ARGUMENT, "REQUEST_INVALID", "GIVE_UP"]
        assert "1025 samples are asked for; at most 1024" in text


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (2, "shard 00000.tar has 2 samples, row 2 was asked for"),
        (1 << 32 | 300, "shard 00001.tar has 300 samples, row 300"),
        (2 << 32, "the dataset has 2 shards, shard 2 was asked for"),
        (2**64 - 1, "shard 4294967295 was asked for"),
    ],
)
def test_numbers_that_do_not_exist(folder: Path, sample: int, message: str) -> None:
    with running({"d": folder}) as server:
        *status, text = refused(server, [0, sample])
    assert status == [CODE.NOT_FOUND, "SAMPLE_UNKNOWN", "GIVE_UP"]
    assert message in text


def test_the_dataset_must_be_the_one_that_is_meant(folder: Path) -> None:
    with running({"d": folder}) as server:
        fingerprint = server.catalog.datasets["d"].fingerprint
        assert len(describe(server, [0], fingerprint=fingerprint)) == 1
        *status, text = refused(server, [0], fingerprint="0" * 64)
        assert status == [CODE.FAILED_PRECONDITION, "DATASET_MISMATCH", "ANOTHER_SERVER"]
        assert fingerprint in text
        status = list(refused(server, [0], dataset="e")[:3])
        assert status == [CODE.NOT_FOUND, "DATASET_UNKNOWN", "ANOTHER_SERVER"]


def test_what_was_asked_for_is_repeated_in_part(folder: Path) -> None:
    with running({"d": folder}) as server:
        text = refused(server, [0], fingerprint="1" * 64 + "2")[-1]
        assert f"was asked for with fingerprint {'1' * 64!r}, the server's has" in text
        text = refused(server, [0], dataset="1" * 128 + "2")[-1]
        assert f"no dataset is named {'1' * 128!r}, there are ['d']" in text
        assert f"--dataset {'1' * 128}=PATH" in text


def test_what_exceeds_a_message_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [{"caption": "a", "long": "x" * (1 << 20)} for _ in range(5)])
    build_index(tmp_path, workers=1)
    with running({"d": tmp_path}) as server:
        assert len(describe(server, [0, 1, 2])) == 3
        *status, text = refused(server, [0, 1, 2, 3])
        assert status == [CODE.INVALID_ARGUMENT, "REQUEST_INVALID", "GIVE_UP"]
        assert "ask for fewer" in text
