"""Vision towers of transformers in our encoder, and back: the same features."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.hf.tiny import (
    TOWERS,
    class_named,
    in_rows,
    make_backbone,
    make_tower,
    normalised,
    our_encoder,
    packed,
    pictures,
    save,
)
from models.hf.tiny_wholes import make_whole

from dataserver.planning.job.fields import Sizing
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.hf import PretrainedError, Usage, export_pretrained, load_into, load_pretrained
from trainclient.models.patches import PIXELS, normalise
from trainclient.models.video_encoder import VideoEncoder

SQUARES = [name for name in TOWERS if not name.startswith("qwen2-vl")]
PATCH = 4


@torch.no_grad()
def their_square(model: Any, images: list[torch.Tensor], pixels: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Normed features of the patches of each image, row by row."""
    found = []
    if model.config.model_type.startswith("siglip2"):
        return their_naflex(model, images, pixels, dtype)
    for image in images:
        sized = image.shape[:2] == (24, 24)
        values = normalised(image, pixels, dtype)[None]
        is_dino = model.config.model_type.startswith("dino")
        options = {} if is_dino else {"interpolate_pos_encoding": not sized}
        out = model(pixel_values=values, **options).last_hidden_state[0]
        if is_dino:
            found.append(out[1 + getattr(model.config, "num_register_tokens", 0) :])
            continue
        is_clip = model.config.model_type.startswith("clip")
        found.append(norm_of(model)(out[1:]) if is_clip else out)
    return found


def their_naflex(model: Any, images: list[torch.Tensor], pixels: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same of a model that takes the patches of all images, with zeros behind those that have fewer."""
    shapes = torch.tensor([[size // PATCH for size in image.shape[:2]] for image in images])
    counts = shapes.prod(1)
    rows = []
    for image in images:
        values = normalised(image, pixels, dtype)
        cut = values.view(3, image.shape[0] // PATCH, PATCH, image.shape[1] // PATCH, PATCH).permute(1, 3, 2, 4, 0)
        rows.append(cut.reshape(-1, 3 * PATCH**2))
    mask = torch.arange(int(counts.max())) < counts[:, None]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    out = model(padded, pixel_attention_mask=mask.int(), spatial_shapes=shapes).last_hidden_state
    return [hidden[:count] for hidden, count in zip(out, counts.tolist(), strict=True)]


def norm_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("post_layernorm"))


@torch.no_grad()
def our_features(model: ImageEncoder, images: list[torch.Tensor], merge: int) -> list[torch.Tensor]:
    patches, grid, offsets = packed(images, PATCH, merge)
    rows = model.merger_norm(model.features(patches, grid, offsets))
    parts = torch.split(rows, offsets.diff().tolist())
    return [in_rows(part, tuple(g), merge) for part, g in zip(parts, grid.tolist(), strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SQUARES)
def test_features_are_those_of_transformers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Images of the size that it was trained on, and of others, back to back."""
    theirs = make_tower(name, dtype)
    found = load_pretrained(save(theirs, tmp_path / "c"))
    assert isinstance(found.config, EncoderConfig)
    ours, missing = our_encoder(found)
    assert missing == ["merger.up.weight", "merger.up.bias", "merger.down.weight", "merger.down.bias"]
    images = pictures([(6, 6), (4, 10), (6, 6), (2, 2)], PATCH)
    bound = 1e-5 if dtype == torch.float32 else 1e-11
    if name.startswith(("dino", "siglip2")):  # transformers scales its positions in float32
        bound = max(bound, 1e-6)
    expected = their_square(theirs, images, found.config.pixels, dtype)
    for made, wanted in zip(our_features(ours, images, 2), expected, strict=True):
        torch.testing.assert_close(made, wanted, rtol=bound, atol=bound)
    left = export_pretrained(tmp_path / "back", ours.config, ours.state_dict())
    assert left == sorted(missing)
    again, report = class_named(TOWERS[name][1]).from_pretrained(
        tmp_path / "back", dtype=dtype, output_loading_info=True
    )
    masks = {"embeddings.mask_token"} if name == "dinov2 with registers" else set()
    assert report["missing_keys"] == masks, "used by its first training alone, and by no model of ours"
    assert not report["unexpected_keys"]
    for made, wanted in zip(their_square(again.eval(), images, found.config.pixels, dtype), expected, strict=True):
        torch.testing.assert_close(made, wanted, rtol=bound, atol=bound)
    assert load_pretrained(tmp_path / "back").config == found.config


@torch.no_grad()
def their_qwen(model: Any, images: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Embeddings of still images, as the processor of Qwen2-VL cuts and doubles them."""
    rows, grids = [], []
    for image in images:
        values = normalised(image, "clip", dtype)
        height, width = (size // PATCH for size in values.shape[1:])
        cut = values.view(3, height // 2, 2, PATCH, width // 2, 2, PATCH).permute(1, 4, 2, 5, 0, 3, 6)
        cut = cut.reshape(height * width, 3, 1, PATCH, PATCH).expand(-1, -1, 2, -1, -1)
        rows.append(cut.reshape(height * width, -1))
        grids.append([1, height, width])
    out = model(torch.cat(rows), grid_thw=torch.tensor(grids))
    made: torch.Tensor = out if isinstance(out, torch.Tensor) else out.pooler_output
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embeddings_of_qwen2_vl_are_those_of_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    """In float64 to 1e-6 only: transformers turns positions in float32."""
    theirs = make_tower("qwen2-vl", dtype)
    found = load_pretrained(save(theirs, tmp_path / "c"))
    ours, missing = our_encoder(found)
    assert missing == []
    images = pictures([(6, 6), (4, 10), (2, 2)], PATCH)
    expected = their_qwen(theirs, images, dtype)
    with torch.no_grad():
        made = ours(*packed(images, PATCH, 2))
    bound = 1e-5 if dtype == torch.float32 else 1e-6
    torch.testing.assert_close(made, expected, rtol=bound, atol=bound)
    assert export_pretrained(tmp_path / "back", ours.config, ours.state_dict()) == []
    model, report = class_named(TOWERS["qwen2-vl"][1]).from_pretrained(
        tmp_path / "back", dtype=dtype, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(their_qwen(model.eval(), images, dtype), expected, rtol=bound, atol=bound)


def test_embeddings_of_a_video_are_those_of_transformers(tmp_path: Path) -> None:
    """Two groups of two frames each, which do not see each other; both kernels are used."""
    theirs = make_tower("qwen2-vl", torch.float32)
    plain, _ = our_encoder(load_pretrained(save(theirs, tmp_path / "c")))
    ours = VideoEncoder(plain.config)
    ours.load_state_dict(plain.state_dict())
    theirs_rows, our_rows = rows_of_a_video("clip", torch.float32)
    with torch.no_grad():
        out = theirs(theirs_rows, grid_thw=VIDEO_GRID)
        expected = out if isinstance(out, torch.Tensor) else out.pooler_output
        made = ours(our_rows, VIDEO_GRID, torch.tensor([0, 48]))
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


def test_embeddings_of_a_video_are_those_of_qwen3_vl(tmp_path: Path) -> None:
    """With the rows that go into the first layers of its language model."""
    theirs = make_whole("qwen3-vl", tmp_path / "c")
    found = load_pretrained(tmp_path / "c", kind=EncoderConfig)
    assert isinstance(found.config, EncoderConfig)
    dtype = next(iter(found.state.values())).dtype
    ours = VideoEncoder(found.config).to(dtype)
    assert load_into(ours, found.state) == []
    theirs_rows, our_rows = rows_of_a_video(found.config.pixels, dtype)
    with torch.no_grad():
        out = theirs.model.visual(theirs_rows, grid_thw=VIDEO_GRID)
        made = ours(our_rows, VIDEO_GRID, torch.tensor([0, 48]))
    expected = torch.cat([out.pooler_output, *out.deepstack_features], dim=1)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


VIDEO_GRID = torch.tensor([[2, 6, 4]])


def rows_of_a_video(pixels: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Four frames as models of transformers take them, and as ours do."""
    frames, cuts = pictures([(6, 4)] * 4, PATCH), []
    for frame in frames:
        cut = normalised(frame, pixels, dtype).view(3, 3, 2, PATCH, 2, 2, PATCH)
        cuts.append(cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(24, 3, 1, PATCH, PATCH))
    theirs = torch.cat([torch.cat(cuts[i : i + 2], dim=2).reshape(24, -1) for i in (0, 2)])
    patches = [packed([frame], PATCH, 2)[0] for frame in frames]
    return theirs, torch.cat([torch.cat(patches[i : i + 2], dim=1) for i in (0, 2)])


def whole_model(kind: str) -> Any:
    """A model that contains a tower."""
    tower = dict(TOWERS["qwen2-vl" if kind == "qwen2_vl" else kind][2])
    text = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 50,
    }
    torch.manual_seed(1)
    if kind == "clip":
        return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=tower))
    if kind == "siglip":
        return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=tower))
    if kind == "siglip2":
        return transformers.Siglip2Model(transformers.Siglip2Config(text_config=text, vision_config=tower))
    text |= {
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    config = transformers.Qwen2VLConfig(text_config=text, vision_config={**tower, "hidden_size": 32})
    return transformers.Qwen2VLForConditionalGeneration(config)


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2", "qwen2_vl"])
def test_the_tower_of_a_larger_model(kind: str, tmp_path: Path) -> None:
    whole = whole_model(kind).eval()
    found = load_pretrained(save(whole, tmp_path / "c"))
    ours, _ = our_encoder(found)
    images = pictures([(6, 6)], PATCH)
    if kind == "qwen2_vl":
        expected = their_qwen(whole.model.visual, images, torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(ours(*packed(images, PATCH, 2)), expected, rtol=1e-5, atol=1e-5)
    else:
        expected = their_square(whole.vision_model, images, found.config.pixels, torch.float32)[0]
        torch.testing.assert_close(our_features(ours, images, 2)[0], expected, rtol=1e-5, atol=1e-5)
    export_pretrained(tmp_path / "back", ours.config, ours.state_dict(), base=tmp_path / "c")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"].startswith(kind)
    again, _ = our_encoder(load_pretrained(tmp_path / "back"))
    patches = packed(images, PATCH, 2)
    with torch.no_grad():
        torch.testing.assert_close(again.features(*patches), ours.features(*patches))


def test_an_encoder_with_a_class_token_takes_a_view_without_images(tmp_path: Path) -> None:
    ours, _ = our_encoder(load_pretrained(save(make_tower("clip"), tmp_path / "c")))
    empty = torch.zeros(0, PATCH**2 * 3, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(1).long()
    assert ours(*empty).shape == (0, 20)


def test_neighbours_change_nothing(tmp_path: Path) -> None:
    ours, _ = our_encoder(load_pretrained(save(make_tower("clip", torch.float64), tmp_path / "c")))
    images = pictures([(6, 6), (4, 2), (2, 8)], PATCH)
    with torch.no_grad():
        together = ours(*packed(images, PATCH, 2))
        alone = torch.cat([ours(*packed([image], PATCH, 2)) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_pixels_are_normalised_as_the_processor_says(tmp_path: Path) -> None:
    folder = save(make_tower("siglip"), tmp_path / "c")
    assert load_pretrained(folder).config.pixels == "half"
    clip = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    (folder / "preprocessor_config.json").write_text(json.dumps(clip | {"size": {"height": 24, "width": 24}}))
    found = load_pretrained(folder)
    assert found.config.pixels == "clip"
    export_pretrained(tmp_path / "back", found.config, found.state, base=folder)
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    assert written["image_mean"] == clip["image_mean"]
    assert written["size"] == {"height": 24, "width": 24}


def test_any_mean_and_deviation_comes_in_and_goes_back(tmp_path: Path) -> None:
    folder = save(make_tower("siglip"), tmp_path / "c")
    other = {"image_mean": [0.1, 0.25, -0.3], "image_std": [0.4, 1, 1e-3]}
    (folder / "preprocessor_config.json").write_text(json.dumps(other))
    found = load_pretrained(folder)
    assert found.config.pixels == "0.1 0.25 -0.3 / 0.4 1.0 0.001"
    export_pretrained(tmp_path / "back", found.config, found.state, base=folder)
    assert json.loads((tmp_path / "back" / "preprocessor_config.json").read_text()) == other
    patches = torch.tensor([[0, 128, 255] * 4], dtype=torch.uint8)
    wanted = [
        (value / 255 - m) / s
        for value, m, s in zip((0, 128, 255), other["image_mean"], other["image_std"], strict=True)
    ] * 4
    torch.testing.assert_close(normalise(patches, 2, torch.float64, found.config.pixels)[0].tolist(), wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_mean": [0.4, 0.4]}, r"preprocessor_config.json: image_mean is \[0.4, 0.4\]; a list of three numbers"),
        ({"image_std": None}, "image_std is None; a list of three numbers"),
        ({"image_mean": [0.4, True, 0.4]}, "image_mean is .* a list of three numbers"),
        ({"image_std": [0.4, 0, 0.4]}, r"image_std is .* one of half, clip, imagenet is required, or three means"),
        ({"image_std": [0.4, 1e999, 0.4]}, "image_std is .* at most 1, such as"),
        ({"image_mean": [123.675, 116.28, 103.53]}, r"three positive deviations of pixels in \[0, 1\], of at most 1,"),
        ({"do_rescale": False}, "preprocessor_config.json: do_rescale is False; True is required: pixels in"),
        ({"do_normalize": False}, "do_normalize is False; True is required"),
        ({"rescale_factor": 1 / 127.5}, r"rescale_factor is 0.0078\d+; 1 / 255 is required"),
    ],
)
def test_mean_and_deviation_that_are_none(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = save(make_tower("siglip"), tmp_path / "c")
    known = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(known | changes))
    with pytest.raises(PretrainedError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("clip", {"hidden_act": "relu"}, "hidden_act is 'relu'; our models have gelu, gelu_pytorch_tanh, quick_gelu"),
        ("clip", {"num_channels": 1}, "num_channels is 1; 3 is required"),
        ("clip", {"image_size": 28}, r"position_embedding.weight; shape \[50, 32\] is required"),
        ("clip", {"image_size": 2}, "image_size is 2; at least patch_size"),
        ("clip", {"patch_size": [4, 8]}, r"patch_size is \[4, 8\]; an integer"),
        ("clip", {"num_attention_heads": 3}, "num_attention_heads is 3; a divisor of hidden_size, 32"),
        ("siglip", {"attention_dropout": 0.5}, "attention_dropout is 0.5"),
        ("siglip", {"vision_config": 3}, "vision_config is 3; an object is required"),
        ("siglip", {"model_type": "clip_vision_model"}, "position_embedding.weight|class_embedding"),
        ("qwen2-vl", {"temporal_patch_size": 4}, "temporal_patch_size is 4; 2 is required"),
        ("qwen2-vl", {"num_heads": 3}, "num_heads is 3; heads of embed_dim, 32, in a multiple of 4"),
        (
            "qwen2-vl",
            {"model_type": "dinov3_vit"},
            "'dinov3_vit'; it cannot be trained here: its patches are rotated",
        ),
        ("siglip2", {"num_patches": 35}, "num_patches is 35; the square of a number"),
        ("siglip2", {"num_patches": 25}, r"position_embedding.weight; shape \[25, 32\] is required"),
        ("qwen2-vl", {"depth": 2}, "no qwen2_vl_vision has, such as blocks.2."),
    ],
)
def test_what_our_encoder_cannot_be(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save(make_tower(name), tmp_path / "c")
    fields = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(PretrainedError, match=message):
        load_pretrained(folder)


@pytest.mark.parametrize("name", ["clip", "siglip"])
@pytest.mark.parametrize(("side", "written"), [(24, 24), (27, 27), (32, 24)])
def test_a_tower_takes_what_the_processor_of_its_export_makes(
    name: str, side: int, written: int, tmp_path: Path
) -> None:
    """A tower of 6 x 6 patches of 4 pixels, whatever grid the job has trained it on."""
    found = load_pretrained(save(make_tower(name), tmp_path / "c"))
    sizing = Sizing.model_validate({"rule": "crop", "patch": 4, "merge": 1, "side": side, "resampling": "bicubic"})
    usage = Usage(3, 4, 512, max_patches=64, sizing=sizing)
    export_pretrained(tmp_path / "back", found.config, found.state, usage=usage)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back", backend="pil")
    pixels = processor(pictures([(9, 12)], PATCH)[0].numpy(), return_tensors="pt")["pixel_values"]
    assert pixels.shape[2:] == (written, written)
    model = class_named(TOWERS[name][1]).from_pretrained(tmp_path / "back")
    assert model(pixels).last_hidden_state.shape[1] - (name == "clip") == 36
    assert load_pretrained(tmp_path / "back").config == found.config


def test_a_naflex_tower_takes_what_the_processor_of_its_export_makes(tmp_path: Path) -> None:
    """With the bound and the filter of the job, not of the size that it was trained on."""
    found = load_pretrained(save(make_tower("siglip2"), tmp_path / "c"))
    given = {"rule": "naflex", "patch": 4, "merge": 1, "max_patches": 20, "resampling": "bicubic"}
    usage = Usage(3, 4, 512, max_patches=20, sizing=Sizing.model_validate(given))
    export_pretrained(tmp_path / "back", found.config, found.state, usage=usage)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back", backend="pil")
    assert type(processor).__name__ == "Siglip2ImageProcessorPil"
    assert processor.resample == 3
    made = processor(pictures([(9, 12)], PATCH)[0].numpy(), return_tensors="pt")
    assert made["pixel_values"].shape == (1, 20, 48)
    assert made["spatial_shapes"].tolist() == [[4, 5]]
    model = class_named("Siglip2VisionModel").from_pretrained(tmp_path / "back")
    assert model(**made).last_hidden_state.shape == (1, 20, 32)
    square = Sizing.model_validate({"rule": "square", "patch": 4, "merge": 1, "side": 24})
    export_pretrained(tmp_path / "other", found.config, found.state, usage=Usage(3, 4, 512, 36, square))
    written = json.loads((tmp_path / "other" / "preprocessor_config.json").read_text())
    assert (written["image_processor_type"], written["max_num_patches"]) == ("Siglip2ImageProcessor", 36)


def test_encoders_that_no_tower_is(tmp_path: Path) -> None:
    qwen = load_pretrained(save(make_tower("qwen2-vl"), tmp_path / "q"))
    for changes, message in (
        ({"patch_bias": True}, "patch_bias is True; qwen2_vl, the next to it, has False"),
        ({"norm_eps": 1e-5}, "norm_eps is 1e-05; qwen2_vl, the next to it, has 1e-06"),
        ({"mlp_width": 50}, "mlp_width is 50; qwen2_vl has a multiple of the width, 32"),
    ):
        with pytest.raises(PretrainedError, match=message):
            export_pretrained(tmp_path / "back", replace(qwen.config, **changes), qwen.state)
    base = save(make_backbone("llama"), tmp_path / "l")
    with pytest.raises(PretrainedError, match="is a llama, and the model a qwen2_vl_vision"):
        export_pretrained(tmp_path / "back", qwen.config, qwen.state, base=base)


@pytest.mark.parametrize(
    ("name", "processor", "size"),
    [
        ("clip", "CLIPImageProcessor", {"shortest_edge": 24}),
        ("siglip", "SiglipImageProcessor", {"height": 24, "width": 24}),
        ("qwen2-vl", "Qwen2VLImageProcessor", {"shortest_edge": 8**2, "longest_edge": 64 * 4**2}),
    ],
)
def test_transformers_finds_the_processor_of_an_export(
    name: str, processor: str, size: dict[str, int], tmp_path: Path
) -> None:
    """Pixels as in training: their scale, filter and normalisation, and how large images may be."""
    found = load_pretrained(save(make_tower(name), tmp_path / "c"))
    export_pretrained(tmp_path / "back", found.config, found.state, usage=Usage(3, 4, 512, max_patches=64))
    made = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back")
    assert type(made).__name__.startswith(processor)
    assert {key: value for key, value in dict(made.size).items() if value is not None} == size
    assert (made.resample, made.do_rescale, made.do_normalize, made.do_convert_rgb) == (2, True, True, True)
    assert [*made.image_mean] == [*PIXELS[found.config.pixels][0]]
    if name == "qwen2-vl":
        assert (made.patch_size, made.merge_size, made.temporal_patch_size) == (4, 2, 2)
