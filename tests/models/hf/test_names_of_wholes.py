"""Names of the tensors of whole models: every form in use is read, and exports have that of their base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models.hf.tiny import save
from models.hf.tiny_wholes import WHOLES, make_whole, our_models, save_released
from safetensors.torch import load_file, save_file

from trainclient.models.hf import TrainedPart, export_whole

NAMES = {
    "llava": 4,
    "onevision": 4,
    "gemma3": 4,
    "internvl": 2,
    "qwen2-vl": 2,
    "qwen2.5-vl": 2,
    "qwen3-vl": 1,
    "idefics3": 1,
    "smolvlm": 1,
}
"""Families, and how many forms of names there are of each."""
QUICK = {"llava", "gemma3", "qwen2-vl"}


def of_modules(name: str, model: Any, folder: Path) -> None:
    """As the modules of transformers 5 are called."""
    save(model, folder, save_original_format=False)


def of_older_modules(name: str, model: Any, folder: Path) -> None:
    """As those of transformers 4, whose towers have one level more where released files have it."""
    of_modules(name, model, folder)
    ours, theirs = (f"model.{begin}" for begin in WHOLES[name].released)
    tensors = load_file(folder / "model.safetensors")
    longer = {key.replace(ours, theirs, 1): value for key, value in tensors.items()}
    save_file(longer, folder / "model.safetensors", metadata={"format": "pt"})


FORMS: dict[str, Callable[[str, Any, Path], object]] = {
    "released": save_released,
    "of models that are made new": lambda _, model, folder: save(model, folder),
    "of modules": of_modules,
    "of older modules": of_older_modules,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in NAMES])
def test_every_form_of_names_is_read_and_written(name: str, tmp_path: Path) -> None:
    theirs, spelled = make_whole(name, tmp_path / "c"), set[frozenset[str]]()
    expected = [module.state_dict() for module in our_models(tmp_path / "c")]
    for form, make in FORMS.items():
        base, back = tmp_path / form, tmp_path / f"{form}, back"
        make(name, theirs, base)
        modules = our_models(base)
        for module, state in zip(modules, expected, strict=True):
            found = module.state_dict()
            assert found.keys() == state.keys()
            assert all(torch.equal(tensor, state[key]) for key, tensor in found.items()), form
        with torch.no_grad():
            for module in modules:
                for parameter in module.parameters():
                    parameter += 0.25
        assert export_whole(back, base, [TrainedPart(m.config, m.state_dict()) for m in modules]) == []
        before, after = (load_file(folder / "model.safetensors") for folder in (base, back))
        assert before.keys() == after.keys()
        spelled.add(frozenset(after))
        _, report = transformers.AutoModelForImageTextToText.from_pretrained(back, output_loading_info=True)
        assert (set(report["missing_keys"]), set(report["unexpected_keys"])) == (set(), set()), form
    assert len(spelled) == NAMES[name]
