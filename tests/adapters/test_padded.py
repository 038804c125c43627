"""Batches of one shape hold what the microbatches hold, and nothing else."""

from typing import Any

import numpy as np
import pytest
from adapters.whole_jobs import whole_job

from trainclient.adapters.full_model import IGNORED_LABEL, FullModelMicrobatch, FullModelStream
from trainclient.adapters.padded import PaddedShape
from trainclient.stream.positions import patch_positions

ROOM = {"budget_bytes": 300, "unit_bytes": 1}
"""Memory for 300 patches; a text of 256 tokens could have 1,024."""


def roomy_job(microbatch: int) -> dict[str, Any]:
    job = whole_job(1, {"epochs": 1})
    job["execution"]["modules"][0]["memory"] = ROOM
    return {**job, "execution": {**job["execution"], "microbatch": microbatch}}


@pytest.fixture(scope="module", params=[1, 2])
def served(server: str, request: pytest.FixtureRequest) -> tuple[PaddedShape, list[FullModelMicrobatch]]:
    with FullModelStream(server, roomy_job(request.param), rank=0, world_size=1) as stream:
        return PaddedShape.of(stream), [m for step in stream for m in step.microbatches]


def test_all_batches_have_the_shape_that_follows_from_the_job(
    served: tuple[PaddedShape, list[FullModelMicrobatch]],
) -> None:
    shape, microbatches = served
    batches = [shape.pad(m) for m in microbatches]
    assert len({tuple((k, v.shape, v.dtype) for k, v in batch.items()) for batch in batches}) == 1
    assert shape.patches == 300
    assert batches[0]["token_ids"].shape == (shape.sequences, 256)
    assert len({len(m.tensors["patches"]) for m in microbatches}) > 3, "what is padded differs"
    assert any(batch["last_of_step"] for batch in batches)


def test_what_is_not_padding_is_the_microbatch(served: tuple[PaddedShape, list[FullModelMicrobatch]]) -> None:
    shape, microbatches = served
    for m in microbatches:
        batch, tensors = shape.pad(m), m.tensors
        held = batch["sample_ids"] > 0
        for name in ("token_ids", "labels", "position_ids"):
            assert batch[name][held].tolist() == tensors[name].tolist()
        assert (batch["labels"][~held] == IGNORED_LABEL).all()
        lengths = np.bincount(batch["sample_ids"][held], minlength=1)[1:]
        assert lengths.tolist() == np.diff(tensors["cu_lengths"]).tolist()
        assert held.sum(1)[: len(tensors["cu_sequences"]) - 1].tolist() == np.diff(tensors["cu_sequences"]).tolist()
        count = len(tensors["patches"])
        assert (batch["patches"][:count] == tensors["patches"]).all()
        assert not batch["patches"][count:].any()
        assert np.bincount(batch["image_ids"])[1:].tolist() == np.diff(tensors["cu_patches"]).tolist()
        slots = batch["embedding_slots"]
        inside = slots[slots < held.size]
        marks = np.zeros(held.size, bool)
        marks[inside] = True
        expected = np.zeros(len(tensors["token_ids"]), bool)
        expected[tensors["embedding_slots"]] = True
        assert marks.reshape(held.shape)[held].tolist() == expected.tolist()
        assert len(inside) == count // 4


def test_positions_of_patches_are_those_of_blocks() -> None:
    """An image of 4 x 6 patches in blocks of 2 x 2, and one of 2 x 2."""
    rows, columns = np.mgrid[:4, :6]
    expected = [x.reshape(2, 2, 3, 2).transpose(0, 2, 1, 3).reshape(-1) for x in (rows, columns)]
    found = patch_positions(np.array([[4, 6], [2, 2]], np.int32), 2)
    assert found[:24].tolist() == np.stack(expected, 1).tolist()
    assert found[24:].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_another_jobs_microbatches_are_refused(server: str) -> None:
    shape = PaddedShape(sequences=1, tokens=256, patches=4, patch_bytes=588, merge=2)
    with FullModelStream(server, whole_job(1, {"steps": 1}), rank=0, world_size=1) as stream:
        microbatches = [m for step in stream for m in step.microbatches]
    with pytest.raises(ValueError, match=r"patches, and batches of one shape have room for 4"):
        _ = [shape.pad(microbatch) for microbatch in microbatches]


@pytest.mark.parametrize("microbatch", [1, 4])
def test_batches_around_a_microbatch_are_padded_to_its_longest_sequence(server: str, microbatch: int) -> None:
    """As padded modules are planned: sequences of similar length are put together."""
    job = whole_job(1, {"epochs": 1}, packing={"enabled": False})
    for module in job["execution"]["modules"]:
        module["padded"] = True
    job["execution"] |= {"microbatch": microbatch, "layout": {"kind": "pipelined", "fewest_microbatches": True}}
    shapes, padding, whole = set(), 0, 0
    with FullModelStream(server, job, rank=0, world_size=1) as stream:
        shape = PaddedShape.of(stream)
        for m in (m for step in stream for m in step.microbatches):
            batch, lengths = shape.around(m).pad(m), np.diff(m.tensors["cu_sequences"])
            assert batch["token_ids"].shape == (len(lengths), lengths.max())
            assert (batch["sample_ids"] > 0).sum(1).tolist() == lengths.tolist()
            assert len(batch.get("patches", ())) == len(m.tensors["patches"])
            shapes.add(batch["token_ids"].shape)
            padding, whole = padding + int((batch["sample_ids"] == 0).sum()), whole + batch["sample_ids"].size
    assert len(shapes) > 3
    assert padding == 0 if microbatch == 1 else 0 < padding / whole < 0.35
