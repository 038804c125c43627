"""Contrastive jobs over a real server: towers get the two sides of the same pairs, batch by batch."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from builders.jobs import compose
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1 import microbatch_pb2
from images.pictures import decode
from serving.harness import Received, Running, index, reason_of, running, tensors
from shards import write_interleaved, write_pairs

from dataserver.dataset import Dataset
from dataserver.images import ImageShape
from dataserver.jobs import fill_job
from dataserver.planning.job.identity import parse_job
from dataserver.planning.job.spec import JobSpec

BATCH, SIZE, SEQ_LEN = 12, 2, 48
RANKS = {"image": 2, "text": 3}
Key = tuple[int, int, int]
"""Dataset, pass, sample."""


def job_data(**stream: Any) -> dict[str, Any]:
    """Two contrastive batches in each step, each of two microbatches of every rank; 96 pairs are four steps."""
    towers = [
        {"name": "image", "kind": "tower", "modality": "image", "dp": RANKS["image"], "pp": 2},
        {"name": "text", "kind": "tower", "modality": "text", "dp": RANKS["text"]},
    ]
    fields = {
        "seq_len": SEQ_LEN,
        "sizing": {"patch": 7, "merge": 1, "max_patches": 64},
        "global_batch": 2 * BATCH,
        "contrastive_batch": BATCH,
        "packing": {"enabled": False},
        "layout": {"kind": "contrastive", "microbatches": SIZE},
        "end": {"epochs": 1, "last": "drop"},
    }
    return compose(towers, **{**fields, **stream})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("towers") / "pairs", 96, 16, seed=4, formats=("JPEG", "PNG")))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[dict[tuple[str, int], Received]]:
    """Everything that every rank of every tower receives."""
    with running({"pairs": folder}) as server:
        yield read_all(server)


def read_all(server: Running) -> dict[tuple[str, int], Received]:
    job_id = server.create(job_data()).job_id
    return {(name, r): server.read(job_id, name, r) for name, ranks in RANKS.items() for r in range(ranks)}


def keys_of(header: Any) -> list[Key]:
    items = header.items
    return list(zip(items.dataset, items.epoch, items.sample, strict=True))


def batches_of(served: dict[tuple[str, int], Received], tower: str) -> dict[tuple[int, int], list[Key]]:
    """For every contrastive batch (step, number) the pairs that a tower holds, over all its ranks."""
    found: dict[tuple[int, int], list[Key]] = {}
    for (name, _), received in served.items():
        for header, _ in received.microbatches if name == tower else ():
            found.setdefault((header.step, header.microbatch // SIZE), []).extend(keys_of(header))
    return found


def test_towers_hold_the_same_pairs_of_every_contrastive_batch(served: dict[tuple[str, int], Received]) -> None:
    image, text = (batches_of(served, tower) for tower in RANKS)
    assert sorted(image) == sorted(text) == [(step, batch) for step in range(4) for batch in range(2)]
    for batch, keys in image.items():
        assert len(set(keys)) == len(keys) == BATCH
        assert sorted(keys) == sorted(text[batch])


def test_every_pair_once_in_a_pass(served: dict[tuple[str, int], Received]) -> None:
    for tower in RANKS:
        keys = [key for batch in batches_of(served, tower).values() for key in batch]
        assert len(keys) == len(set(keys)) == 96
        assert {epoch for _, epoch, _ in keys} == {0}


def test_headers(served: dict[tuple[str, int], Received]) -> None:
    """One plan for all views, equal counts, no routings, no denominators of other losses; what the stages do."""
    hashes = {}
    for (tower, _), received in served.items():
        cursors = [(h.step, h.microbatch) for h, _ in received.microbatches]
        assert cursors == [(step, microbatch) for step in range(4) for microbatch in range(2 * SIZE)]
        for header, _ in received.microbatches:
            assert hashes.setdefault(header.step, header.plan_hash) == header.plan_hash
            assert len(header.items.sample) == BATCH // RANKS[tower] // SIZE
            assert list(header.items.image) == ([0] * len(header.items.sample) if tower == "image" else [])
            known = microbatch_pb2.VALIDITY_VALID if tower == "image" else microbatch_pb2.VALIDITY_UNKNOWN
            assert set(header.items.validity) == {known}
            assert not header.routings
            assert not header.sequence_valid
            assert (header.denominators.text_tokens, header.denominators.target_patches) == (0, 0)
            drained = {s.module: s.drain_every for s in header.schedules}
            assert list(drained.values()) in ([0, 0], [SIZE, SIZE])
            held = {s.module: list(s.in_flight) for s in header.schedules}
            assert held == {"image": [SIZE if drained["image"] else SIZE + 1, SIZE], "text": [SIZE]}
    assert len(set(hashes.values())) == 4


def test_text_towers_get_the_texts(served: dict[tuple[str, int], Received], folder: Path) -> None:
    dataset, cut = Dataset.open(folder), 0
    ids = spec_of(folder).stream.tokenizer
    for (tower, _), received in served.items():
        for header, body in received.microbatches if tower == "text" else ():
            found = tensors(header, body)
            assert sorted(found) == ["cu_lengths", "position_ids", "token_ids"]
            expected = []
            for _, _, sample in keys_of(header):
                text = "".join(dataset.shards[sample >> 32].parts(sample & 0xFFFFFFFF).texts).encode()
                expected.append([ids.bos, *text[: SEQ_LEN - 2], ids.eos])
                cut += len(text) > SEQ_LEN - 2
            assert found["token_ids"].tolist() == [token for tokens in expected for token in tokens]
            assert found["position_ids"].tolist() == [n for tokens in expected for n in range(len(tokens))]
            assert found["cu_lengths"].tolist() == [0, *np.cumsum([len(tokens) for tokens in expected])]
    assert 0 < cut < 96


def test_image_towers_get_the_pixels(served: dict[tuple[str, int], Received], folder: Path) -> None:
    dataset, sizing = Dataset.open(folder), spec_of(folder).stream.sizing
    for (tower, _), received in served.items():
        for header, body in received.microbatches if tower == "image" else ():
            found = tensors(header, body)
            assert sorted(found) == ["cu_patches", "grid", "patches"]
            parts = []
            for (rows, columns), (_, _, sample) in zip(found["grid"].tolist(), keys_of(header), strict=True):
                ref = dataset.shards[sample >> 32].image(sample & 0xFFFFFFFF, 0)
                shape = ImageShape(ref.width, ref.height, ref.orientation, rows, columns)
                valid, patches = decode(dataset.read(ref), shape, sizing)
                assert valid
                parts.append(patches)
            assert np.array_equal(found["patches"], np.concatenate(parts))
            assert found["cu_patches"].tolist() == [0, *np.cumsum([len(part) for part in parts])]


def test_another_server_sends_the_same_bytes(served: dict[tuple[str, int], Received], folder: Path) -> None:
    with running({"pairs": folder}, decode_threads=1) as server:
        again = read_all(server)
    assert {view: received.blob() for view, received in served.items()} == {v: r.blob() for v, r in again.items()}


def test_plans_over_the_service(folder: Path) -> None:
    """The plan of a contrastive step names tower arrangements, schedules, candidates and decisions."""
    with running({"pairs": folder}) as server:
        job_id = server.create(job_data()).job_id
        plan = server.stub.GetPlan(pb.GetPlanRequest(job_id=job_id, step=1), timeout=60).plan
    assert [a.module for a in plan.arrangements] == list(RANKS)
    assert [sorted(a.item) for a in plan.arrangements] == [list(range(2 * BATCH))] * 2
    assert len(plan.candidates) == 4
    assert [d.subject for d in plan.decisions] == ["step", "image", "text"]
    assert 0 < plan.lower_bound_ns <= plan.makespan_after_ns <= plan.makespan_before_ns


def test_samples_that_are_no_pairs_are_refused_when_the_job_is_created(tmp_path: Path) -> None:
    documents = index(write_interleaved(tmp_path / "docs", 24, 8, seed=2))
    with running({"docs": documents}) as server, pytest.raises(grpc.RpcError) as caught:
        server.create(job_data(datasets=[{"name": "docs"}]))
    _, reason, _, text = reason_of(caught.value)
    assert reason == "JOB_INVALID"
    assert "for contrastive training it needs one image and some text" in text


def test_memory_that_might_not_hold_a_batch_is_refused_when_the_job_is_created(folder: Path) -> None:
    """And the memory that the message asks for holds every batch."""
    data = job_data()
    memory = data["execution"]["modules"][0]["memory"] = {"budget_bytes": 100, "unit_bytes": 1}
    with running({"pairs": folder}) as server:
        with pytest.raises(grpc.RpcError) as caught:
            server.create(data)
        _, reason, action, text = reason_of(caught.value)
        assert (reason, action) == ("MICROBATCH_TOO_LARGE", "GIVE_UP")
        found = re.search(r"raise memory.budget_bytes of image to (\d+)", text)
        assert found is not None, text
        memory["budget_bytes"] = int(found[1])
        received = server.read(server.create(data).job_id, "image", 0)
    assert len(received.microbatches) == 4 * 2 * SIZE


def spec_of(folder: Path) -> JobSpec:
    with running({"pairs": folder}) as server:
        return parse_job(fill_job(job_data(), server.catalog)).spec
