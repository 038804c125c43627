"""Tiny random vision-language models of transformers, and what they and ours make of the same samples."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from models.hf.tiny import normalised, packed, pictures, randomise, rotary, save
from safetensors.torch import load_file, save_file
from torch import Tensor

from dataserver.planning.job.fields import Sizing
from dataserver.planning.plan.rotary_positions import rotary_positions
from dataserver.planning.stream.grids import image_layouts
from dataserver.planning.stream.tiles import layout_tokens
from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.hf import load_into, load_pretrained

IMAGE, START, END, VOCAB = 90, 91, 92, 97
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SQUARE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 4,
}
QWEN: dict[str, Any] = {"depth": 4, "num_heads": 2, "patch_size": 4, "in_channels": 3}
IDS = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 93}


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    return rotary(rope_type="default", rope_theta=1e6, mrope_section=[*sections], **more)


@dataclass(frozen=True)
class Whole:
    """A family, and how its models take images."""

    config: Callable[[], Any]
    inputs: Callable[[list[Tensor], EncoderConfig, Tensor], dict[str, Any]]
    grids: list[tuple[int, int]]
    """Rows and columns in patches of a sample's images."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Widths and heights of a sample's images that are cut into tiles; the grids are then those of parts."""
    released: tuple[str, str] = ("", "")
    """How released files spell the beginning of some names, which models that are made new are saved without."""


def _qwen_inputs(images: list[Tensor], config: EncoderConfig, ids: Tensor) -> dict[str, Any]:
    rows, grids, patch = [], [], config.patch
    for image in images:
        values = normalised(image, config.pixels, torch.float64)
        height, width = (size // patch for size in values.shape[1:])
        cut = values.view(3, height // 2, 2, patch, width // 2, 2, patch).permute(1, 4, 2, 5, 0, 3, 6)
        rows.append(cut.reshape(height * width, 3, 1, -1).expand(-1, -1, 2, -1).reshape(height * width, -1))
        grids.append([1, height, width])
    kinds = (ids == IMAGE).int()
    return {"pixel_values": torch.cat(rows), "image_grid_thw": torch.tensor(grids), "mm_token_type_ids": kinds}


def _stacked(images: list[Tensor], config: EncoderConfig, ids: Tensor) -> dict[str, Any]:
    return {"pixel_values": torch.stack([normalised(image, config.pixels, torch.float64) for image in images])}


def _with_types(images: list[Tensor], config: EncoderConfig, ids: Tensor) -> dict[str, Any]:
    return {**_stacked(images, config, ids), "token_type_ids": (ids == IMAGE).long()}


def _as_sample(images: list[Tensor], config: EncoderConfig, ids: Tensor) -> dict[str, Any]:
    return {"pixel_values": _stacked(images, config, ids)["pixel_values"][None]}


def _cut(images: list[Tensor], config: EncoderConfig, ids: Tensor) -> dict[str, Any]:
    """The parts of each image, and zeros behind those of images that have fewer."""
    counts = [1 + rows * columns for rows, columns in ONEVISION_LAYOUTS[:, :2].tolist()]
    parts = torch.split(_stacked(images, config, ids)["pixel_values"], counts)
    sizes = [[height, width] for width, height in ONEVISION_SIZES]
    return {
        "pixel_values": torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True),
        "image_sizes": torch.tensor(sizes),
    }


ONEVISION_GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2)]
ONEVISION_SIZES = ((60, 40), (31, 90), (20, 20))
"""With borders above and beside, and with more rows than the model takes."""
ONEVISION_SIZING = Sizing.model_validate(
    {
        "rule": "tiles",
        "patch": 4,
        "merge": 1,
        "side": 24,
        "resampling": "bicubic",
        "tiles": {"choice": "pinpoints", "grids": ONEVISION_GRIDS, "max_tiles": 2},
    }
)
_WIDTHS, _HEIGHTS = np.array(ONEVISION_SIZES).T
ONEVISION_LAYOUTS = image_layouts(_WIDTHS, _HEIGHTS, np.ones(len(ONEVISION_SIZES), np.bool_), ONEVISION_SIZING)


def _onevision() -> Any:
    return transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **SQUARE, "image_size": 24},
        image_grid_pinpoints=[[rows * 24, columns * 24] for rows, columns in ONEVISION_GRIDS],
        vision_aspect_ratio="anyres_max_2",
        image_token_index=IMAGE,
        video_token_index=93,
    )


def _internvl() -> Any:
    vision = {**SQUARE, "image_size": [24, 24], "patch_size": [4, 4], "attention_bias": True}
    return transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config=vision,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )


def _llava(vision: str, text: str = "llama", **fields: Any) -> Callable[[], Any]:
    return lambda: transformers.LlavaConfig(
        text_config={"model_type": text, **TEXT},
        vision_config={"model_type": vision, **SQUARE, "image_size": 24},
        image_token_index=IMAGE,
        **fields,
    )


def _qwen3_vl(**fields: Any) -> Callable[[], Any]:
    vision = {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
    return lambda: transformers.Qwen3VLConfig(
        text_config={**TEXT, **_mrope(4, 2, 2, mrope_interleaved=True), **fields},  # older releases read it there
        vision_config={**vision, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]},
        **IDS,
        **fields,
    )


def _gemma3() -> Any:
    text = {**TEXT, "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**SQUARE, "image_size": 24},
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    )


def _idefics3(kind: str) -> Callable[[], Any]:
    return lambda: getattr(transformers, kind)(
        text_config={"model_type": "llama", **TEXT},
        vision_config={**SQUARE, "image_size": 24},
        image_token_id=IMAGE,
        scale_factor=2,
    )


SIDES = [(6, 6), (6, 6)]
RELEASED = ("vision_tower.", "vision_tower.vision_model.")
WHOLES: dict[str, Whole] = {
    "qwen2-vl": Whole(
        lambda: transformers.Qwen2VLConfig(
            text_config={**TEXT, **_mrope(2, 3, 3)},
            vision_config={**QWEN, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
            **IDS,
        ),
        _qwen_inputs,
        [(4, 10), (6, 2)],
    ),
    "qwen2.5-vl": Whole(
        lambda: transformers.Qwen2_5_VLConfig(
            text_config={**TEXT, **_mrope(2, 3, 3)},
            vision_config={
                **QWEN,
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 32,
                "window_size": 16,
                "fullatt_block_indexes": [1, 3],
            },
            **IDS,
        ),
        _qwen_inputs,
        [(6, 10), (4, 2)],
    ),
    "qwen3-vl": Whole(_qwen3_vl(), _qwen_inputs, [(4, 10), (6, 6)]),
    "qwen3-vl, tied": Whole(_qwen3_vl(tie_word_embeddings=True), _qwen_inputs, [(4, 10)]),
    "llava": Whole(_llava("clip_vision_model"), _stacked, SIDES, released=RELEASED),
    "llava with siglip and qwen2": Whole(
        _llava("siglip_vision_model", "qwen2", vision_feature_select_strategy="full", vision_feature_layer=-1),
        _stacked,
        SIDES,
        released=RELEASED,
    ),
    "llava with phi3": Whole(_llava("clip_vision_model", "phi3"), _stacked, SIDES, released=RELEASED),
    "onevision": Whole(
        _onevision,
        _cut,
        [(6, 6)] * sum(1 + rows * columns for rows, columns in ONEVISION_LAYOUTS[:, :2].tolist()),
        ONEVISION_SIZES,
        RELEASED,
    ),
    "internvl": Whole(_internvl, _stacked, SIDES),
    "gemma3": Whole(_gemma3, _with_types, SIDES, released=RELEASED),
    "idefics3": Whole(_idefics3("Idefics3Config"), _as_sample, SIDES),
    "smolvlm": Whole(_idefics3("SmolVLMConfig"), _as_sample, SIDES),
}


def make_whole(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model with noise in every tensor, and its folder with the names of released files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(WHOLES[name].config(), attn_implementation="eager")
    randomise(model, 0)
    model = model.to(dtype).eval()
    save_released(name, model, folder)
    return model


def save_released(name: str, model: Any, folder: Path) -> None:
    """Save a model under the names of released files."""
    ours, theirs = WHOLES[name].released
    save(model, folder)
    path = folder / "model.safetensors"
    tensors = {
        key.replace(ours, theirs, 1) if ours and key.startswith(ours) and not key.startswith(theirs) else key: value
        for key, value in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True, eq=False)
class Sample:
    """One sample: text, its images, text between and after."""

    images: list[Tensor]
    ids: Tensor
    """int64 [1, T]"""
    tiles: Tensor | None = None
    """int32 [images, 6]: layouts, where `images` are parts."""


def sample_of(name: str, encoder: EncoderConfig, length: int = 0) -> Sample:
    """A sample whose images have the grids of a family, and text behind them up to a length in tokens."""
    grids, layouts = WHOLES[name].grids, None
    counts = [rows * columns // encoder.merge**2 for rows, columns in grids]
    if WHOLES[name].sizes:
        layouts, counts = ONEVISION_LAYOUTS, layout_tokens(ONEVISION_LAYOUTS, ONEVISION_SIZING).tolist()
    generator = torch.Generator().manual_seed(7)
    parts: list[Tensor] = [torch.randint(0, 80, (5,), generator=generator)]
    for count in counts:
        tokens = torch.full((count,), IMAGE)
        parts += [torch.tensor([START]), tokens, torch.tensor([END])]
        parts.append(torch.randint(0, 80, (6,), generator=generator))
    parts.append(torch.randint(0, 80, (max(0, length - sum(map(len, parts))),), generator=generator))
    tiles = None if layouts is None else torch.from_numpy(layouts)
    return Sample(pictures(grids, encoder.patch), torch.cat(parts)[None], tiles)


def their_loss(name: str, model: Any, sample: Sample, encoder: EncoderConfig) -> tuple[Tensor, Tensor]:
    """Logits [T, vocabulary], and the sum of the losses of all text tokens."""
    inputs = WHOLES[name].inputs(sample.images, encoder, sample.ids)
    dtype = next(model.parameters()).dtype
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    logits = model(input_ids=sample.ids, attention_mask=torch.ones_like(sample.ids), **inputs).logits[0]
    labels = labels_of(sample)
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return logits, loss


def labels_of(sample: Sample) -> Tensor:
    """Int64 [T], shifted: text tokens alone are targets."""
    labels = torch.full((sample.ids.shape[1],), -100)
    labels[:-1] = sample.ids[0, 1:]
    return labels.masked_fill(labels >= IMAGE, -100)


def our_models(folder: Path) -> tuple[ImageEncoder, BackboneStage]:
    """Encoder and backbone of a folder, in the type that it has."""
    vision, text = load_pretrained(folder, kind=EncoderConfig), load_pretrained(folder, kind=BackboneConfig)
    assert isinstance(vision.config, EncoderConfig)
    assert isinstance(text.config, BackboneConfig)
    dtype = next(iter(text.state.values())).dtype
    encoder, backbone = ImageEncoder(vision.config).to(dtype), BackboneStage(text.config).to(dtype)
    assert load_into(encoder, vision.state) == []
    assert load_into(backbone, text.state) == []
    return encoder, backbone


def batch_of(sample: Sample, encoder: EncoderConfig, backbone: BackboneConfig) -> BackboneBatch:
    """A backbone's view of the sample alone."""
    ids = sample.ids[0]
    slots = (ids == IMAGE).nonzero().squeeze(1)
    grid = np.array([[image.shape[0], image.shape[1]] for image in sample.images]) // encoder.patch
    positions = torch.arange(len(ids))
    if backbone.sections is not None:
        ends = np.array([0, len(ids)])
        positions = torch.from_numpy(rotary_positions(positions.numpy(), ends, slots.numpy(), grid // encoder.merge))
    blocks = torch.full((len(ids),), -1)
    blocks[slots] = (slots.diff(prepend=slots[:1]) > 1).cumsum(0)
    return BackboneBatch(
        cu_lengths=torch.tensor([0, len(ids)]),
        position_ids=positions,
        token_ids=ids,
        embedding_slots=slots,
        condition_slots=torch.zeros(0, dtype=torch.int64),
        labels=labels_of(sample),
        image_blocks=blocks if backbone.two_way_images else None,
    )


def our_loss(encoder: ImageEncoder, backbone: BackboneStage, sample: Sample) -> tuple[Tensor, Tensor]:
    """The same of ours."""
    patches, grid, offsets = packed(sample.images, encoder.config.patch, encoder.config.merge)
    rows = encoder(patches, grid, offsets, sample.tiles)
    batch = batch_of(sample, encoder.config, backbone.config)
    loss = backbone(batch, embeddings=rows).loss_sum
    assert loss is not None
    with torch.no_grad():
        hidden = backbone._run_layers(backbone._embed(batch, rows, None), batch, rows)
        logits = torch.nn.functional.linear(backbone.norm(hidden), backbone.head_weight)
    return logits, loss


def gradients_as_checkpoint(name: str, model: Any, folder: Path) -> Path:
    """A folder whose weights are the gradients of a model, so that they can be read by our names."""
    held = copy.deepcopy(model)
    for theirs, parameter in zip(model.parameters(), held.parameters(), strict=True):
        parameter.data = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
    save_released(name, held, folder)
    return folder


def gradient_bound(name: str, key: str, wanted: Tensor) -> float:
    """How far a gradient in float32 may be from that of transformers: 1e-5 of the largest value of its tensor, or where
    only roundings give one, 1e-6. A key's bias moves all scores of a query by the same, unless keys are rotated."""
    if key.startswith("vit.") and key.endswith("attention.key.bias") and not name.startswith("qwen"):
        return 1e-6
    return 1e-5 * float(wanted.abs().max())


def differing(config: BackboneConfig | EncoderConfig) -> BackboneConfig | EncoderConfig:
    """Sizes of another model."""
    return replace(config, mlp_width=config.mlp_width + 8)
