"""Checkpoints that transformers 4.57 makes come in, and exports go back to it: the same logits.

Where its computation differs from that of transformers 5 (docs/training.md), exports are compared under the latter.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models.hf.older import IMAGES, bases, computed, load
from models.hf.test_backbones import IDS, USAGE
from models.hf.test_towers import our_features
from models.hf.tiny import our_backbone, our_encoder, our_logits
from models.hf.tiny_wholes import our_loss, our_models, sample_of
from safetensors.torch import load_file
from torch import Tensor

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import TrainedPart, export_pretrained, export_whole, load_pretrained

DIFFERENT = {"onevision", "llava with siglip and qwen2", "idefics3", "smolvlm"}
"""Wholes that 4.57 computes otherwise: SigLIP's last features behind its norm; other positions of patches."""
ROOT = Path(__file__).parents[3]


def run(python: Path, what: str, folder: Path) -> None:
    """Run the script by an interpreter, which has nothing to say against configurations."""
    folders = [str(ROOT), *(str(ROOT / name) for name in ("tests", "scripts", "protos"))]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    line = [python, ROOT / "tests" / "models" / "hf" / "older.py", what, folder]
    done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "nrecognized" not in done.stderr, done.stderr


@torch.no_grad()
def train(module: torch.nn.Module) -> dict[str, Tensor]:
    """All parameters, other than they began."""
    generator = torch.Generator().manual_seed(9)
    for parameter in module.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return {name: value.clone() for name, value in module.state_dict().items()}


@torch.no_grad()
def tuned(kind: str, name: str, path: Path) -> Tensor:
    """Load a checkpoint, change all of it, and export it; what ours then makes of the samples."""
    base = path / "base"
    if kind == "whole":
        encoder, backbone = our_models(base)
        parts = [TrainedPart(module.config, train(module)) for module in (encoder, backbone)]
        export_whole(path / "trained", base, parts)
        return our_loss(encoder, backbone, sample_of(name, encoder.config))[0]
    found = load_pretrained(base)
    ours: Any = our_backbone(found) if kind == "backbone" else our_encoder(found)[0]
    state = train(ours)
    export_pretrained(path / "trained", ours.config, state, base=base)
    export_pretrained(path / "alone", ours.config, state, usage=USAGE)
    return our_logits(ours, IDS) if kind == "backbone" else torch.cat(our_features(ours, IMAGES, 2))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_older_transformers_and_ours_compute_the_same(tmp_path: Path, python_with: Callable[[str], Path]) -> None:
    python = python_with("transformers4")
    run(python, "make", tmp_path)
    made = {(kind, name): tuned(kind, name, path) for kind, name, path in bases(tmp_path)}
    run(python, "run", tmp_path)
    said = json.loads((tmp_path / "report.json").read_text())
    assert {(kind, name) for kind, name, *_ in said} == made.keys()
    off = []
    for kind, name, export, missing, unexpected in said:
        of_training = ["embeddings.mask_token"] if name == "dinov2 with registers" else []
        assert (missing, unexpected) == (of_training, []), (kind, name, export)
        path, wanted = tmp_path / kind / name, made[kind, name]
        found = load_file(path / f"{export}.safetensors")["made"]
        if kind == "whole" and name in DIFFERENT:
            assert not torch.allclose(found, wanted, rtol=1e-3, atol=1e-3), "it computes the same now"
            config = load_pretrained(path / export, names=(), kind=EncoderConfig).config
            found = computed(kind, name, load(kind, name, path / export)[0], config)
        if not torch.allclose(found, wanted, rtol=1e-5, atol=1e-5):
            off.append(f"{kind} {name} {export} by {float((found - wanted).abs().max()):.1e}")
    assert off == []
