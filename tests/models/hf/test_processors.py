"""What processors of transformers write is read as sizings of jobs, and jobs of other rules are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.jobs import make_job
from transformers import AutoImageProcessor, CLIPImageProcessorPil, Qwen2VLImageProcessorPil, SiglipImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

from dataserver.planning.job.fields import Sizing
from trainclient.models.hf import PretrainedError
from trainclient.models.hf.processors import processor_fields, processor_of, processor_sizing, require_same_rule

QWEN = {"rule": "qwen", "min_pixels": 3136, "max_pixels": 1003520, "resampling": "bicubic"}
CROP = {"rule": "crop", "side": 224, "resampling": "bicubic"}
MADE: list[tuple[Any, dict[str, Any]]] = [
    (Qwen2VLImageProcessorPil(), QWEN),
    (Qwen2VLImageProcessorPil(min_pixels=784, max_pixels=7840), {**QWEN, "min_pixels": 784, "max_pixels": 7840}),
    (Siglip2ImageProcessorPil(), {"rule": "naflex", "max_patches": 256, "resampling": "bilinear"}),
    (SiglipImageProcessorPil(size={"height": 384, "width": 384}),
     {"rule": "square", "side": 384, "resampling": "bicubic"}),
    (Gemma3ImageProcessorPil(), {"rule": "square", "side": 224, "resampling": "bilinear"}),
    (CLIPImageProcessorPil(), CROP),
    (CLIPImageProcessorPil(size={"shortest_edge": 256}, resample=1),
     {**CROP, "shortest_edge": 256, "resampling": "lanczos"}),
]  # fmt: skip
WRITTEN: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056},  # as released
     {**QWEN, "max_pixels": 12845056}),
    ({"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
     {**QWEN, "min_pixels": 65536, "max_pixels": 16777216}),
    ({"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336}, {**CROP, "side": 336}),
    ({"image_processor_type": "CLIPImageProcessor", "size": 112, "crop_size": 336}, None),
    ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 1, "width": 2}}, None),
    ({"image_processor_type": "SiglipImageProcessor", "size": {"height": 8, "width": 8}, "do_resize": False}, None),
    ({"image_processor_type": "Gemma3ImageProcessor", "do_pan_and_scan": True}, {"rule": "tiles"}),
    ({"image_processor_type": "Idefics3ImageProcessor"}, {"rule": "tiles"}),
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


@pytest.mark.parametrize("sizing", [s for _, s in MADE if s["rule"] != "naflex"])
def test_sizings_come_back_from_the_processors_of_exports(sizing: dict[str, Any], tmp_path: Path) -> None:
    job, packs = Sizing.model_validate({**sizing, "merge": 1}), sizing["rule"] == "qwen"
    written = processor_of(job, packs)
    assert processor_of(job, not packs) == {}, "a model that takes images in another form"
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
    ],
)
def test_wrong_fields_are_named(written: dict[str, Any], why: str, tmp_path: Path) -> None:
    file = {"image_processor_type": "Qwen2VLImageProcessor", **written}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(file))
    found = processor_fields(tmp_path)
    assert found is not None
    with pytest.raises(PretrainedError, match=why):
        processor_sizing(found)


def test_a_job_of_another_rule_is_refused_and_one_without_gets_a_note(tmp_path: Path) -> None:
    assert require_same_rule(tmp_path, Sizing()) is None, "the folder says nothing"
    Qwen2VLImageProcessorPil().save_pretrained(tmp_path)
    same, fewer = {**QWEN, "patch": 14}, {**QWEN, "max_pixels": 784 * 16}
    assert require_same_rule(tmp_path, Sizing.model_validate(same)) is None
    fields = "{rule: qwen, min_pixels: 3136, max_pixels: 1003520, resampling: bicubic}"
    for sizing in (Sizing(), Sizing.model_validate(fewer)):
        assert str(require_same_rule(tmp_path, sizing)).endswith(f"its sizing has {fields}")
    square = make_job(stream={"sizing": {"rule": "square", "side": 56}}).stream.sizing
    with pytest.raises(PretrainedError, match=rf"sizing.rule is square, .* rule qwen; set sizing to {fields}"):
        require_same_rule(tmp_path, square)
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "Idefics3ImageProcessor"}')
    with pytest.raises(PretrainedError, match=r"has the rule tiles; no job has this rule: leave sizing.rule out"):
        require_same_rule(tmp_path, square)
    assert "cuts images into tiles" in str(require_same_rule(tmp_path, Sizing()))
