"""What processors of transformers write is read as sizings of jobs, and jobs of other rules are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoImageProcessor, CLIPImageProcessorPil, Qwen2VLImageProcessorPil, SiglipImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from dataserver.planning.job.fields import Sizing, SizingRule, Tiles
from trainclient.models.hf import PretrainedError
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.processors import (
    processor_fields,
    processor_of,
    processor_sizing,
    require_same_rule,
    sizing_note,
    with_bounds_of,
)

QWEN = {"rule": "qwen", "min_pixels": 3136, "max_pixels": 1003520, "resampling": "bicubic"}
CROP = {"rule": "crop", "side": 224, "resampling": "bicubic"}
PAD = {"rule": "pad", "side": 336, "resampling": "bicubic", "background": None}
SIDE_336: dict[str, Any] = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
LLAVA = {"image_processor_type": "LlavaImageProcessor", "size": 336, "crop_size": 336, "do_pad": True}
IDEFICS3 = {
    "rule": "tiles",
    "side": 364,
    "tiles": Tiles(choice="edge", longest_edge=1456),  # type: ignore[arg-type]
    "resampling": "lanczos",
}
INTERNVL = {
    "rule": "tiles",
    "side": 448,
    "tiles": Tiles(choice="aspect", min_tiles=1, max_tiles=12),  # type: ignore[arg-type]
    "resampling": "bicubic",
}
ONEVISION = {
    "rule": "tiles",
    "side": 384,
    "tiles": Tiles(choice="pinpoints", grids=((1, 2), (2, 1)), max_tiles=9),  # type: ignore[arg-type]
    "resampling": "bicubic",
}
MADE: list[tuple[Any, dict[str, Any]]] = [
    (Qwen2VLImageProcessorPil(), QWEN),
    (Qwen2VLImageProcessorPil(min_pixels=784, max_pixels=7840), {**QWEN, "min_pixels": 784, "max_pixels": 7840}),
    (Siglip2ImageProcessorPil(), {"rule": "naflex", "merge": 1, "max_patches": 256, "resampling": "bilinear"}),
    (SiglipImageProcessorPil(size={"height": 384, "width": 384}),
     {"rule": "square", "side": 384, "resampling": "bicubic"}),
    (Gemma3ImageProcessorPil(), {"rule": "square", "side": 224, "resampling": "bilinear"}),
    (CLIPImageProcessorPil(), CROP),
    (CLIPImageProcessorPil(size={"shortest_edge": 256}, resample=1),
     {**CROP, "shortest_edge": 256, "resampling": "lanczos"}),
    (LlavaImageProcessorPil(do_pad=True, **SIDE_336), PAD),
    (Idefics3ImageProcessorPil(), IDEFICS3),
    (GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True), INTERNVL),
    (LlavaOnevisionImageProcessorPil(image_grid_pinpoints=[[384, 768], [768, 384]]), ONEVISION),
]  # fmt: skip
WRITTEN: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056},  # as released
     {**QWEN, "max_pixels": 12845056}),
    ({"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
     {**QWEN, "min_pixels": 65536, "max_pixels": 16777216}),
    ({"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336}, {**CROP, "side": 336}),
    ({"feature_extractor_type": "CLIPFeatureExtractor", "size": 224, "crop_size": 224, "resample": 3}, CROP),
    ({"image_processor_type": "LlavaImageProcessor", "size": 336, "crop_size": 336}, {**CROP, "side": 336}),
    (LLAVA, PAD),
    ({**LLAVA, "image_mean": [0.5, 0.25, 0]}, {**PAD, "background": (127, 63, 0)}),
    ({"image_processor_type": "LlavaImageProcessor", "size": 336, "crop_size": 224, "do_pad": True},
     {"rule": "padded"}),
    ({"image_processor_type": "LlavaImageProcessor", "do_pad": True, "do_resize": False}, {"rule": "padded"}),
    ({"image_processor_type": "CLIPImageProcessor", "size": 112, "crop_size": 336}, None),
    ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 1, "width": 2}}, None),
    ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 8, "width": 8}, "do_resize": False}, None),
    ({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}, {"rule": "crops"}),
    ({"image_processor_type": "LlavaNextImageProcessor"}, {"rule": "crops"}),
    ({"image_processor_type": "Idefics3ImageProcessor"}, IDEFICS3),
    ({"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False}, None),
    ({"image_processor_type": "ViTImageProcessor"}, None),
    ({}, None),
]  # fmt: skip


@pytest.mark.parametrize(("processor", "sizing"), MADE)
def test_processors_that_transformers_writes(processor: Any, sizing: dict[str, Any], tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    found = processor_fields(tmp_path)
    assert found is not None
    assert processor_sizing(found) == sizing


@pytest.mark.parametrize(("written", "sizing"), WRITTEN)
def test_processors_of_other_releases(written: dict[str, Any], sizing: dict[str, Any] | None, tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": written}))
    found = processor_fields(tmp_path)
    assert found is not None
    assert processor_sizing(found) == sizing


@pytest.mark.parametrize("sizing", [s for _, s in MADE if s["rule"] != "tiles"])
def test_sizings_come_back_from_the_processors_of_exports(sizing: dict[str, Any], tmp_path: Path) -> None:
    job = Sizing.model_validate({**sizing, "merge": 1})
    packs = job.rule if job.rule in (SizingRule.QWEN, SizingRule.NAFLEX) else None
    grid = 0 if packs else sizing["side"] // 14
    written = processor_of(job, packs, grid)
    for other in {SizingRule.QWEN, SizingRule.NAFLEX, None} - {packs}:
        assert processor_of(job, other, grid) == {}, "a model that takes images in another form"
    assert packs or processor_of(job, packs, grid + 1) == {}, "a model that takes larger pictures"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    found = processor_fields(tmp_path)
    assert found is not None
    assert processor_sizing(found) == sizing
    loaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil").to_dict()
    assert {name: loaded[name] for name in written} == written


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ({"max_pixels": 2**40}, "max_pixels is 1099511627776; an integer from 1 to 2147483648"),
        ({"size": {"shortest_edge": -1}}, "size: shortest_edge is -1"),
        ({"resample": 0}, r"resample is 0; one of 1 \(lanczos\), 2 \(bilinear\), 3 \(bicubic\) is required"),
        ({"size": "large"}, "size is 'large'; an object is required"),
        (
            {**LLAVA, "image_mean": [0.5, 2, 0]},
            r"image_mean is \[0.5, 2, 0\]; three numbers from 0 to 1 are required",
        ),
    ],
)
def test_wrong_fields_are_named(written: dict[str, Any], why: str, tmp_path: Path) -> None:
    file = {"image_processor_type": "Qwen2VLImageProcessor", **written}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    found = processor_fields(tmp_path)
    assert found is not None
    with pytest.raises(PretrainedError, match=why):
        processor_sizing(found)


@pytest.mark.parametrize(
    ("kind", "written", "why"),
    [
        ("GotOcr2", {"min_patches": 9, "max_patches": 3}, "min_patches is 9; an integer from 1 to 3 is required"),
        ("Idefics3", {"size": {"longest_edge": 1000}}, "size: longest_edge is 1000; an even multiple of 364"),
        ("Idefics3", {"size": {"longest_edge": 91}, "max_image_size": {"longest_edge": 91}}, "an even multiple of 91"),
        ("Idefics3", {"size": {"longest_edge": 140}, "max_image_size": {"longest_edge": 2}}, "at most 64 times it"),
    ],
)
def test_wrong_tiles_are_named(kind: str, written: dict[str, Any], why: str, tmp_path: Path) -> None:
    write(tmp_path, f"{kind}ImageProcessor", **written)
    found = processor_fields(tmp_path)
    assert found is not None
    with pytest.raises(PretrainedError, match=why):
        processor_sizing(found)
    assert "is not understood" in str(sizing_note(tmp_path, Sizing()))


SQUARE = {"rule": "square", "side": 56}


def test_a_job_of_another_rule_is_refused(tmp_path: Path) -> None:
    square = Sizing.model_validate(SQUARE)
    require_same_rule(tmp_path, square)  # the folder says nothing
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    require_same_rule(tmp_path, Sizing())
    require_same_rule(tmp_path, Sizing.model_validate({**QWEN, "max_pixels": 784 * 16}))
    fields = "{rule: qwen, min_pixels: 3136, max_pixels: 1003520, resampling: bicubic, quality: exact}"
    with pytest.raises(PretrainedError, match=rf"sizing.rule is square, .* rule qwen; set in sizing {fields}"):
        require_same_rule(tmp_path, square)
    write(tmp_path, "Siglip2ImageProcessor")
    with pytest.raises(PretrainedError, match=r"\{rule: naflex, merge: 1, max_patches: 256, resamp"):
        require_same_rule(tmp_path, square)


def test_a_job_that_sizes_otherwise_gets_a_note(tmp_path: Path) -> None:
    assert sizing_note(tmp_path, Sizing()) is None, "the folder says nothing"
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    assert sizing_note(tmp_path, Sizing.model_validate(QWEN)) is None
    fields = "set in sizing {rule: qwen, min_pixels: 3136, max_pixels: 1003520, resampling: bicubic, quality: exact}"
    for sizing in (Sizing(), Sizing.model_validate({**QWEN, "max_pixels": 784 * 16})):
        assert str(sizing_note(tmp_path, sizing)).endswith(fields)


@pytest.mark.parametrize(
    ("kind", "changes", "note"),
    [
        (
            "Idefics3ImageProcessor",
            {},
            "tiles: {choice: edge, longest_edge: 1456}, resampling: lanczos, ",
        ),
        ("LlavaNextImageProcessor", {}, "cuts images into parts of their own"),
        ("LlavaImageProcessor", {"do_pad": True, "size": 336}, "pads images to squares otherwise than"),
    ],
)
def test_what_no_rule_does_is_a_note_for_every_job(
    kind: str, changes: dict[str, Any], note: str, tmp_path: Path
) -> None:
    write(tmp_path, kind, **changes)
    for sizing in (Sizing(), Sizing.model_validate(SQUARE)):
        require_same_rule(tmp_path, sizing)
        assert note in str(sizing_note(tmp_path, sizing))


def test_borders_of_another_colour_than_the_mean_have_no_processor() -> None:
    job = Sizing.model_validate({**PAD, "merge": 1, "background": [127, 127, 127]})
    assert processor_of(job, None, 24) == {}
    assert processor_of(job, None, 24, (0.5, 0.5, 0.5))["do_pad"]


@pytest.mark.parametrize(("mean", "colour"), [([0.5, 0.5, 0.5], (127, 127, 127)), (None, (122, 116, 104))])
def test_jobs_with_borders_of_another_colour_get_a_note(
    mean: list[float] | None, colour: tuple[int, ...], tmp_path: Path
) -> None:
    """In either direction: of a processor with CLIP's mean, which jobs leave out, and with another."""
    data = {**LLAVA, "image_mean": mean}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(data))
    fields = f"{{rule: pad, side: 336, resampling: bicubic, background: {[*colour]}, quality: exact}}"
    for background in (None, (127, 127, 127), (0, 0, 0)):
        job = Sizing.model_validate({**PAD, "resampling": "bilinear", "background": background})
        require_same_rule(tmp_path, job)
        same = (background or (122, 116, 104)) == colour
        assert with_bounds_of(job, Fields(data, "")) == (data | {"resample": 2} if same else data)
        note = sizing_note(tmp_path, Sizing.model_validate({**PAD, "background": background}))
        assert note is None if same else str(note).endswith(f"set in sizing {fields}")
    with pytest.raises(PretrainedError, match=f"has the rule pad; set in sizing {re.escape(fields)}"):
        require_same_rule(tmp_path, Sizing.model_validate(SQUARE))


def test_a_filter_that_no_job_has_is_a_note_for_jobs_without_rule(tmp_path: Path) -> None:
    write(tmp_path, "SiglipImageProcessor", size={"height": 56, "width": 56}, resample=0)
    require_same_rule(tmp_path, Sizing())
    assert "is not understood" in (note := str(sizing_note(tmp_path, Sizing())))
    assert "resample is 0; one of 1 (lanczos)" in note
    with pytest.raises(PretrainedError, match="resample is 0"):
        require_same_rule(tmp_path, Sizing.model_validate(SQUARE))


def write(folder: Path, kind: str, **fields: Any) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": kind, **fields}))


OTHER: list[tuple[Any, dict[str, Any]]] = [
    (Qwen2VLImageProcessorPil(), {**QWEN, "min_pixels": 784, "max_pixels": 7840, "resampling": "lanczos"}),
    (Siglip2ImageProcessorPil(), {"rule": "naflex", "merge": 1, "max_patches": 64, "resampling": "bicubic"}),
    (SiglipImageProcessorPil(size={"height": 384, "width": 384}),
     {"rule": "square", "side": 384, "resampling": "lanczos"}),
    (CLIPImageProcessorPil(), {**CROP, "shortest_edge": 256, "resampling": "lanczos"}),
    (CLIPImageProcessorPil(size={"shortest_edge": 256}), CROP),
    (LlavaImageProcessorPil(do_pad=True, **SIDE_336), {**PAD, "resampling": "bilinear"}),
    (Idefics3ImageProcessorPil(),
     {**IDEFICS3, "tiles": Tiles(choice="edge", longest_edge=728), "resampling": "bicubic"}),  # type: ignore[arg-type]
    (GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}),
     {**INTERNVL, "tiles": Tiles(choice="aspect", min_tiles=2, max_tiles=6)}),  # type: ignore[arg-type]
    (LlavaOnevisionImageProcessorPil(image_grid_pinpoints=[[384, 768], [768, 384]]),
     {**ONEVISION, "tiles": Tiles(choice="pinpoints", grids=((1, 1),), max_tiles=9)}),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("processor", "sizing"), OTHER)
def test_processors_get_the_bounds_and_the_filter_of_a_job(
    processor: Any, sizing: dict[str, Any], tmp_path: Path
) -> None:
    """Of every rule; transformers reads them as the job has them, and nothing else changes."""
    processor.save_pretrained(tmp_path)
    found = processor_fields(tmp_path)
    assert found is not None
    merge = 2 if sizing["rule"] == "qwen" else 1
    job = Sizing.model_validate({"merge": merge, **sizing})
    written = with_bounds_of(job, found)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    again = processor_fields(tmp_path)
    assert again is not None
    assert processor_sizing(again) == sizing
    loaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert loaded.do_resize
    assert written.keys() >= found.data.keys()
    assert with_bounds_of(job, again) == written
    side = Sizing.model_validate({"rule": "square", "side": 28, "resampling": "bilinear"})
    assert with_bounds_of(side, found) == dict(found.data), "of another rule, or side"
