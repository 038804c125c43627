"""A step of a whole released model has the loss and gradients of transformers on the same samples."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from models.hf.tiny import normalised, randomise
from models.hf.tiny_wholes import (
    ONEVISION_GRIDS,
    WHOLES,
    gradient_bound,
    gradients_as_checkpoint,
    save_released,
)
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool
from torch import Tensor
from torch.testing import assert_close

from dataserver.dataset import Dataset
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.samples import ROW_BITS
from dataserver.planning.stream.tiles import num_parts
from trainclient.client import Batch
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import load_pretrained
from trainclient.models.patches import assemble_image

IMAGE, VOCAB = 260, 300
"""The image token of the tokenizer `bytes`, and more tokens than it has."""
SQUARE = {"patch": 4, "merge": 2, "side": 24, "resampling": "bicubic"}
GRIDS = {"choice": "pinpoints", "grids": ONEVISION_GRIDS, "max_tiles": 2}
QWEN = {"rule": "qwen", "patch": 4, "merge": 2, "min_pixels": 256, "max_pixels": 1600}
SIZINGS: dict[str, dict[str, Any]] = {
    "internvl": {**SQUARE, "rule": "tiles", "tiles": {"choice": "aspect", "min_tiles": 1, "max_tiles": 3}},
    "idefics3": {**SQUARE, "rule": "tiles", "tiles": {"choice": "edge", "longest_edge": 48}},
    "onevision": {**SQUARE, "merge": 1, "rule": "tiles", "tiles": GRIDS},
    "llava": {**SQUARE, "merge": 1, "rule": "crop"},
    "smolvlm": {**SQUARE, "rule": "tiles", "tiles": {"choice": "edge", "longest_edge": 48}},
    "gemma3": {**SQUARE, "merge": 3, "rule": "square"},
    "qwen2-vl": QWEN,
    "qwen2.5-vl": QWEN,
    "qwen3-vl": QWEN,
    "qwen3-vl, tied": QWEN,
}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
LOSS = {"float64": 1e-6, "float32": 1e-5}
"""Largest relative difference of losses."""
PIPELINED, COLOCATED = Degrees(1, 1, 2, 0), Degrees(2, 2, 1, 0, colocated=True)


def make_folder(name: str, folder: Path) -> Any:
    """A model in double precision with noise in every tensor, and its folder; single precision holds its weights."""
    config = WHOLES[name].config()
    config.text_config.vocab_size = VOCAB
    config.image_token_id = IMAGE
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    randomise(model, 0)
    save_released(name, model.double(), folder)
    return model.eval()


def parts_of(batch: Batch, sizing: Sizing) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """Sample and number of each image of an encoder's view, and its parts, uint8 [height, width, 3] each."""
    patches, grid, ends = (batch.tensors[name] for name in ("patches", "grid", "cu_patches"))
    counts = np.ones(len(batch.items.sample), np.int64)
    if sizing.tiles is not None:
        counts = num_parts(batch.tensors["tiles"].numpy(), sizing.tiles)
    part = 0
    for sample, image, count in zip(batch.items.sample, batch.items.image, counts.tolist(), strict=True):
        pictures = [
            assemble_image(patches[ends[at] : ends[at + 1]], *grid[at].tolist(), sizing.patch, sizing.merge)
            for at in range(part, part + count)
        ]
        yield (int(sample), int(image)), pictures
        part += count


def inputs_of(name: str, images: list[list[Tensor]], sizes: list[tuple[int, int]], ids: Tensor, encoder: Any) -> Any:
    """What a model of transformers takes beside ids: for the parts of each image, and its width and height."""
    parts = [part for image in images for part in image]
    if not parts:
        return {}
    if name == "onevision":
        pixels = [torch.stack([normalised(p, encoder.pixels, torch.float64) for p in image]) for image in images]
        return {
            "pixel_values": torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True),
            "image_sizes": torch.tensor([[height, width] for width, height in sizes]),
            "batch_num_images": torch.tensor([len(images)]),
        }
    found = WHOLES[name].inputs(parts, encoder, ids)
    kinds = (ids == IMAGE).long()
    return {**found, **{key: kinds for key in ("token_type_ids", "mm_token_type_ids") if key in found}}


def expected_step(name: str, model: Any, case: Case, folder: Path, data: Path) -> tuple[float, dict[str, Tensor]]:
    """The sum of the losses of all targets of a job whose modules have one rank each, and by our names the gradients
    of their mean; in the type of the case."""
    model = model.to(DTYPES[case.dtype])
    model.zero_grad()
    vision = load_pretrained(folder, kind=EncoderConfig).config
    sizing, dataset, total = case.parsed.stream.sizing, Dataset.open(data), 0.0
    for seen, said in zip(case.batches("vit", 0), case.batches("llm", 0), strict=True):
        images = dict(parts_of(seen, sizing))
        ends, ids, labels = (said.tensors[key].long() for key in ("cu_lengths", "token_ids", "labels"))
        for at, sample in enumerate(said.items.sample.tolist()):
            here, shard = slice(*ends[at : at + 2].tolist()), dataset.shards[sample >> ROW_BITS]
            of_sample = [images[key] for key in sorted(images) if key[0] == sample]
            refs = [shard.image(sample & ((1 << ROW_BITS) - 1), number) for number in range(len(of_sample))]
            given = inputs_of(name, of_sample, [(r.width, r.height) for r in refs], ids[None, here], vision)
            if given:
                given["pixel_values"] = given["pixel_values"].to(DTYPES[case.dtype])
            logits = model(input_ids=ids[None, here], attention_mask=torch.ones_like(ids[None, here]), **given).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels[here], ignore_index=-100, reduction="sum")
            (loss / said.text_tokens).backward()
            total += loss.item()
    gradients = gradients_as_checkpoint(name, model, folder.with_name(f"gradients of {case.name}"))
    kinds = {"vit": EncoderConfig, "llm": BackboneConfig}
    return total, {
        f"{module}.{key}": value
        for module, kind in kinds.items()
        for key, value in load_pretrained(gradients, kind=kind).state.items()
    }


def require_close(name: str, case: Case, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare gradients. In double precision transformers, too, computes rotary angles and norms in single."""
    for key, gradient in found.items():
        if case.dtype == "float64":
            rtol, atol = 1e-4, 1e-5 * max(1e-2, float(expected[key].abs().max()))
        else:
            rtol, atol = 0.0, gradient_bound(name, key, expected[key])
        assert_close(gradient, expected[key], rtol=rtol, atol=atol, msg=lambda m, k=key: f"{case.dtype}, {k}: {m}")


def compare(name: str, degrees: Degrees, fleet: Fleet, pool: Pool, folder: Path, **encoder: bool) -> None:
    dataset = "pairs" if name == "onevision" else "docs"
    options = {"sizing": SIZINGS[name], "seq_len": 480, "global_batch": 4, "generation": {"ratio": "0"}}
    ours, one = fleet.pair_of_jobs(degrees, dataset=dataset, **options)
    model = make_folder(name, folder / "model")
    modules: dict[str, Any] = {module: {"weights": str(folder / "model")} for module in ("vit", "llm")}
    modules["vit"] |= encoder
    cases = [Case(f"{name} {dtype}", fleet.address, ours, dtype=dtype, modules=modules) for dtype in DTYPES]
    found = pool.run(cases, folder)
    for case in cases:
        reference = replace(case, job=one)
        loss, expected = expected_step(name, model, reference, folder / "model", fleet.folders[dataset])
        trained = {key for key in expected if key.startswith(("llm.", "vit.merger.")) or not encoder}
        assert found[case.name].keys() == trained
        losses = [float(path.read_text()) for path in folder.glob(f"{case.name}.*.loss")]
        assert sum(losses) == pytest.approx(loss, rel=LOSS[case.dtype])
        require_close(name, case, found[case.name], expected)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_step_has_the_loss_and_gradients_of_transformers(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    compare("internvl", PIPELINED, fleet, pool, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("degrees", [PIPELINED, COLOCATED], ids=["pipelined", "colocated"])
@pytest.mark.parametrize("name", SIZINGS)
def test_a_step_of_each_family_has_the_loss_and_gradients_of_transformers(
    name: str, degrees: Degrees, fleet: Fleet, pool: Pool, tmp_path: Path
) -> None:
    compare(name, degrees, fleet, pool, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_projector_that_is_trained_alone_has_the_gradients_of_transformers(
    fleet: Fleet, pool: Pool, tmp_path: Path
) -> None:
    """LLaVA's first stage."""
    compare("llava", PIPELINED, fleet, pool, tmp_path, freeze_tower=True)
