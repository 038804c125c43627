"""What models of Qwen2-VL's family take, against transformers' own."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from adapters.test_full_model import read
from adapters.whole_jobs import mixed_job, pass_with_parity, tiny_model, whole_job
from disttrain.v1.microbatch_pb2 import MicrobatchHeader
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataserver.planning.job.fields import Sizing
from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream
from trainclient.adapters.qwen2_vl import Qwen2VLInputs


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen2VLForConditionalGeneration:
    return Qwen2VLForConditionalGeneration.from_pretrained(tiny_model(tmp_path_factory.mktemp("model"))).double()


@pytest.fixture(scope="module")
def microbatches(server: str) -> list[FullModelMicrobatch]:
    with FullModelStream(server, whole_job(1, {"steps": 2}), rank=0, world_size=1) as stream:
        return [m for step in stream for m in step.microbatches]


def test_a_packed_microbatch_is_its_samples_one_by_one(
    model: Qwen2VLForConditionalGeneration, microbatches: list[FullModelMicrobatch]
) -> None:
    """Transformers makes positions of a sample alone by itself; packed, they are the stream's."""
    inputs = Qwen2VLInputs.of(model.config, Sizing(patch=14, merge=2, max_patches=64))
    several = 0
    for microbatch in microbatches:
        batch = inputs(microbatch, torch.device("cpu"))
        with torch.no_grad():
            together = model(**batch).logits[0]
            bounds = microbatch.tensors["cu_lengths"]
            apart = [_alone(model, microbatch, batch, n) for n in range(len(bounds) - 1)]
        torch.testing.assert_close(together, torch.cat(apart), rtol=1e-6, atol=1e-8)
        several += len(microbatch.rows) > 2
    assert several


def test_an_image_in_place_of_missing_ones_runs_the_encoder_and_changes_nothing(
    server: str, model: Qwen2VLForConditionalGeneration
) -> None:
    inputs = Qwen2VLInputs.of(model.config, Sizing(patch=14, merge=2, max_patches=64))
    with FullModelStream(server, mixed_job(1, {"steps": 3}), rank=0, world_size=1) as stream:
        plain = next(m for step in stream for m in step.microbatches if not len(m.rows))
    shortfall = replace(plain, backbone=replace(plain.backbone, header=MicrobatchHeader(images_on_some_ranks=True)))
    found = []
    for microbatch in (plain, shortfall):
        batch = inputs(microbatch, torch.device("cpu"))
        model.zero_grad()
        loss = model(**batch, num_items_in_batch=7).loss
        loss.backward()
        encoder, others = [], []
        for name, parameter in model.named_parameters():
            (encoder if ".visual." in name else others).append(parameter.grad)
        found.append((loss, others, encoder, len(batch["input_ids"][0])))
    (loss, others, encoder, length), (loss_too, others_too, encoder_too, length_too) = found
    assert length_too == length + 1
    torch.testing.assert_close(loss, loss_too, rtol=1e-9, atol=0)
    torch.testing.assert_close(others, others_too, rtol=1e-9, atol=1e-12)
    assert all(g is None for g in encoder)
    assert not any(g.any() for g in encoder_too)


def test_a_microbatch_without_tokens_is_one_that_adds_nothing(
    server: str, model: Qwen2VLForConditionalGeneration
) -> None:
    """As a rank has where parity takes a microbatch more."""
    inputs = Qwen2VLInputs.of(model.config, Sizing(patch=14, merge=2, max_patches=64))
    job = lambda ranks, _: pass_with_parity(ranks)  # noqa: E731
    empty = [m for m in read(server, 2, {}, job_of=job) if not len(m.tensors["token_ids"])]
    batch = inputs(empty[0], torch.device("cpu"))
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=7).loss
    loss.backward()
    assert float(loss) == 0
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_text_that_has_the_id_of_the_models_images_is_refused(microbatches: list[FullModelMicrobatch]) -> None:
    """Before a model looks for embeddings that nobody sends."""
    microbatch = next(m for m in microbatches if len(m.rows))
    tensors = microbatch.tensors
    text = np.delete(tensors["token_ids"], tensors["embedding_slots"])
    inputs = Qwen2VLInputs(image_token=int(text[1]), frames=2)
    count = len(tensors["embedding_slots"]) + int((text == text[1]).sum())
    with pytest.raises(ValueError, match=rf": {count} tokens have the model's image id {text[1]}, and images have"):
        inputs(microbatch, torch.device("cpu"))


def _alone(
    model: Qwen2VLForConditionalGeneration, microbatch: FullModelMicrobatch, batch: dict[str, Any], n: int
) -> Tensor:
    tensors = microbatch.tensors
    first, end = tensors["cu_lengths"][n : n + 2].tolist()
    ids = batch["input_ids"][:, first:end]
    found: dict[str, Tensor] = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
    begin = tensors["embedding_slots"][np.cumsum(microbatch.rows) - microbatch.rows]
    mine = np.flatnonzero((begin >= first) & (begin < end))
    if len(mine):
        patches = slice(*tensors["cu_patches"][[mine[0], mine[-1] + 1]].tolist())
        found |= {"image_grid_thw": batch["image_grid_thw"][mine], "pixel_values": batch["pixel_values"][patches]}
    return model(**found).logits[0]


def test_labels_are_those_of_the_stream_after_the_shift_of_the_model(microbatches: list[FullModelMicrobatch]) -> None:
    inputs = Qwen2VLInputs(image_token=290, frames=2)
    for microbatch in microbatches:
        labels = inputs(microbatch, torch.device("cpu"))["labels"][0]
        assert torch.nn.functional.pad(labels, (0, 1), value=-100)[1:].tolist() == microbatch.tensors["labels"].tolist()


def test_patches_are_those_of_transformers_image_processor() -> None:
    """Of an image that needs no scaling."""
    sizing = Sizing(patch=14, merge=2, max_patches=64)
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), np.uint8)
    theirs = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=1, max_pixels=1 << 20)(
        images=[pixels], return_tensors="pt"
    )
    blocks = pixels.reshape(2, 2, 14, 3, 2, 14, 3).transpose(0, 3, 1, 4, 2, 5, 6)
    ours = Qwen2VLInputs(image_token=0, frames=2).pixels(torch.from_numpy(blocks.reshape(24, -1).copy()))
    assert theirs["image_grid_thw"].tolist() == [[1, 4, 6]]
    torch.testing.assert_close(ours, theirs["pixel_values"], rtol=1e-5, atol=1e-5)
    assert sizing.merge == 2


def test_other_patches_than_the_models() -> None:
    vision = SimpleNamespace(patch_size=16, spatial_merge_size=2, temporal_patch_size=2)
    with pytest.raises(ValueError, match=r"'patch': 14.*'patch': 16.*set stream.sizing"):
        Qwen2VLInputs.of(SimpleNamespace(vision_config=vision), Sizing(patch=14, merge=2, max_patches=64))
