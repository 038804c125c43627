"""What headers say of validity, from a real server."""

from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from disttrain.v1 import microbatch_pb2 as mb
from serving.harness import Running, index, job_data, reason_of, running, tensors
from shards import break_images, write_pairs

from dataserver.assembly import Validity

BROKEN = 3
Found = dict[tuple[str, int], set[int]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return index(write_pairs(tmp_path / "d", 16, 16, seed=6))


def job(server: Running, **execution: Any) -> str:
    """One pass, about half of the samples generated."""
    data = job_data(datasets=[{"name": "d"}], end={"epochs": 1}, generation={"ratio": "0.5", "query_tokens": 8})
    data["execution"].update(execution)
    return server.create(data).job_id


def validities(server: Running, job_id: str) -> Found:
    """By module and sample what any view says."""
    found: Found = {}
    for module, rank in (("vit", 0), ("vit", 1), ("llm", 0), ("llm", 1), ("gen", 0)):
        for header, body in server.read(job_id, module, rank).microbatches:
            for n, (sample, validity) in enumerate(zip(header.items.sample, header.items.validity, strict=True)):
                found.setdefault((module, sample), set()).add(validity)
                views = tensors(header, body)
                if module == "llm":
                    labels = views["labels"][slice(*views["cu_lengths"][n : n + 2])]
                    assert validity != mb.VALIDITY_INVALID or (labels == -100).all()
                if module == "gen":
                    assert views["loss_mask"][n] == (validity == mb.VALIDITY_VALID)
    return found


def test_the_numbers_are_those_of_the_proto() -> None:
    assert {f"VALIDITY_{v.name}": v.value for v in Validity} == {k: v for k, v in mb.Validity.items() if v}


def test_by_default_only_the_views_of_images_know(folder: Path) -> None:
    break_images(folder, (BROKEN, 0))
    with running({"d": folder}) as server:
        job_id = job(server)
        found = validities(server, job_id)
    assert {v for (module, _), said in found.items() for v in said if module == "llm"} == {mb.VALIDITY_UNKNOWN}
    images = {sample: said for (module, sample), said in found.items() if module != "llm"}
    assert images == {row: {mb.VALIDITY_INVALID if row == BROKEN else mb.VALIDITY_VALID} for row in range(16)}


def test_exact_validity_of_every_sample(folder: Path) -> None:
    break_images(folder, (BROKEN, 0))
    with running({"d": folder}) as server:
        job_id = job(server, validity="exact")
        found = validities(server, job_id)
        before = server.read(job(server), "llm").microbatches
        after = server.read(job_id, "llm").microbatches
    expected = {row: {mb.VALIDITY_INVALID if row == BROKEN else mb.VALIDITY_VALID} for row in range(16)}
    assert {sample: said for (module, sample), said in found.items() if module == "llm"} == expected
    assert {sample: said for (module, sample), said in found.items() if module != "llm"} == expected
    for (plain, _), (header, _) in zip(before, after, strict=True):
        assert plain.denominators == header.denominators
        assert list(plain.items.sample) == list(header.items.sample)


def test_exact_validity_waits_for_storage_and_gives_up_without_a_verdict(folder: Path) -> None:
    with running({"d": folder}) as server:
        job_id = job(server, validity="exact")
        (folder / "00000.tar").unlink()
        with pytest.raises(grpc.RpcError) as caught:
            server.read(job_id, "llm")
        assert reason_of(caught.value)[:3] == (grpc.StatusCode.UNAVAILABLE, "STORAGE_UNAVAILABLE", "RETRY")


def test_other_words_are_refused(server: Running) -> None:
    data = job_data()
    data["execution"]["validity"] = "guess"
    with pytest.raises(grpc.RpcError) as caught:
        server.create(data)
    *status, text = reason_of(caught.value)
    assert status == [grpc.StatusCode.FAILED_PRECONDITION, "JOB_UNSUPPORTED", "ANOTHER_SERVER"]
    assert "execution.validity: found \"guess\"; it should be 'exact'" in text


def test_resuming_an_exact_stream_gives_identical_bytes(server: Running) -> None:
    data = job_data()
    data["execution"]["validity"] = "exact"
    job_id = server.create(data).job_id
    whole = server.read(job_id, "llm")
    assert {v for header, _ in whole.microbatches for v in header.items.validity} == {mb.VALIDITY_VALID}
    at = len(whole.microbatches) // 2
    header = whole.microbatches[at][0]
    rest = server.read(job_id, "llm", start_step=header.step, start_microbatch=header.microbatch)
    assert rest.blob() == whole.blob()[at:]
    packed = server.read(job_id, "llm", accepted_codecs=[mb.CODEC_ZSTD])
    for (one, body), (two, other) in zip(whole.microbatches, packed.microbatches, strict=True):
        expected, found = tensors(one, body), tensors(two, other)
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
