"""What another release of transformers makes of checkpoints: run by its interpreter, `older.py make|run FOLDER`."""

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from models.hf.test_backbones import their_logits
from models.hf.test_towers import PATCH, their_square
from models.hf.tiny import BACKBONES, TOWERS, class_named, make_backbone, make_tower, pictures, save
from models.hf.tiny_wholes import WHOLES, make_whole, sample_of
from safetensors.torch import save_file
from torch import Tensor

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import load_pretrained

IMAGES = pictures([(6, 6), (4, 10)], PATCH)
SQUARE_TOWERS = [name for name in TOWERS if not name.startswith("qwen2-vl")]


def bases(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """The kind and the name of each model, and where it lies."""
    for kind, names in (("whole", WHOLES), ("backbone", BACKBONES), ("tower", SQUARE_TOWERS)):
        for name in names:
            yield kind, name, folder / kind / name


def make(folder: Path) -> None:
    """Make all models as this release does, with noise in every tensor."""
    for kind, name, path in bases(folder):
        if kind == "whole":
            make_whole(name, path / "base")
        else:
            save((make_backbone if kind == "backbone" else make_tower)(name), path / "base")


@torch.no_grad()
def computed(kind: str, name: str, model: Any, config: Any) -> Tensor:
    """Logits or features of samples that are the same wherever this runs."""
    if kind == "backbone":
        return their_logits(model)
    if kind == "tower":
        return torch.cat(their_square(model, IMAGES, config.pixels, torch.float32))
    sample = sample_of(name, config)
    inputs = WHOLES[name].inputs(sample.images, config, sample.ids)
    inputs["pixel_values"] = inputs["pixel_values"].float()
    known = inspect.signature(model.forward).parameters
    inputs = {key: value for key, value in inputs.items() if key in known or key != "mm_token_type_ids"}
    logits: Tensor = model(input_ids=sample.ids, attention_mask=torch.ones_like(sample.ids), **inputs).logits
    return logits[0]


def load(kind: str, name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """A model, and what its loader says of it."""
    if kind == "tower":
        loader = class_named(TOWERS[name][1])
    else:
        loader = getattr(transformers, f"AutoModelFor{'CausalLM' if kind == 'backbone' else 'ImageTextToText'}")
    model, report = loader.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    return model.eval(), report


def run(folder: Path) -> None:
    """Load and run what was exported; `report.json` gets what loading said of each."""
    said = []
    for kind, name, path in bases(folder):
        for export in ("trained", "alone"):
            if (path / export).is_dir():
                model, report = load(kind, name, path / export)
                config = None
                if kind != "backbone":
                    config = load_pretrained(path / export, names=(), kind=EncoderConfig).config
                said.append(
                    [kind, name, export, *(sorted(report[f"{keys}_keys"]) for keys in ("missing", "unexpected"))]
                )
                save_file({"made": computed(kind, name, model, config).contiguous()}, path / f"{export}.safetensors")
    (folder / "report.json").write_text(json.dumps(said))


if __name__ == "__main__":
    {"make": make, "run": run}[sys.argv[1]](Path(sys.argv[2]))
