"""Checkpoints of Hugging Face's Trainer: whether one is whole, and whether a model has what it was saved with."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from trainclient.adapters.saved_weights import differing
from trainclient.adapters.state_file import STATE_FILE

_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""What the Trainer puts beside a checkpoint that SIGTERM asked for, until it is complete."""


def begin_saving(folder: Path) -> None:
    """Take away what would make a checkpoint that is saved once more look whole: the Trainer writes it last."""
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)


def read_whole(folder: Path, sharded: bool) -> tuple[dict[str, Any], int]:
    """State of the stream, and the number of updates, of a checkpoint.

    Args:
        folder: of the checkpoint.
        sharded: whether the optimizer's state lies in files of many names.

    Raises:
        ValueError: it is not whole; names the newest one beside it that is.
    """
    missing = _missing(folder, sharded)
    if missing is None:
        state = json.loads((folder / STATE_FILE).read_text())
        return state, json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"]
    others = [other for other in folder.parent.glob("checkpoint-*") if other != folder and _number(other) >= 0]
    whole = [other for other in others if _missing(other, sharded) is None]
    if whole:
        newest = max(whole, key=_number)
        remedy = f"remove it and resume from {newest}, the newest whole one (resume_from_checkpoint={str(newest)!r})"
    else:
        remedy = "no other one beside it is whole: begin anew, in another output_dir or without resume_from_checkpoint"
    raise ValueError(
        f"{folder} is no whole checkpoint ({missing}); it was cut short while it was saved, or written without this "
        f"adapter or with save_only_model: {remedy}"
    )


def require_loaded(model: nn.Module, folder: Path, saved: dict[str, Any]) -> None:
    """Make sure that a model has the tensors that a checkpoint was made of.

    Those that the Trainer has left out, since `save_pretrained` wrote them with other names or shapes than the model's,
    are loaded as `from_pretrained` does.

    Args:
        model: into which the Trainer has loaded the checkpoint.
        folder: of the checkpoint.
        saved: digests of the tensors.

    Raises:
        ValueError: it has others all the same.
    """
    names, error = differing(model, saved), ""
    if names and isinstance(model, PreTrainedModel):
        error = _load_as_pretrained(model, folder)
        names = differing(model, saved)
    if names:
        raise ValueError(
            f"{len(names)} of {len(saved)} tensors are not those that {folder} was saved with after it was loaded, "
            f"such as {names[0]}{error}: its files or the model have changed, or are loaded by other names; make the "
            f"model with from_pretrained({str(folder)!r}) before resuming, or resume from another checkpoint"
        )


def _load_as_pretrained(model: PreTrainedModel, folder: Path) -> str:
    """Why it failed, if it did."""
    types = [p.dtype for p in model.parameters() if p.is_floating_point()]
    widest = max(types, key=lambda dtype: dtype.itemsize, default=torch.float32)
    try:
        loaded = type(model).from_pretrained(folder, dtype=widest)
        model.load_state_dict(loaded.state_dict())
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        return f" (from_pretrained: {error})"
    return ""


def _missing(folder: Path, sharded: bool) -> str | None:
    """What keeps a checkpoint from being whole."""
    for name in (STATE_FILE, TRAINER_STATE_NAME):
        try:
            if not isinstance(json.loads((folder / name).read_text()), dict):
                return f"{name} holds no mapping"
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
    for name in (SCHEDULER_NAME,) if sharded else (OPTIMIZER_NAME, SCHEDULER_NAME):
        if not (folder / name).exists():
            return f"{name} is missing"
    return f"{_INCOMPLETE} is there" if (folder / _INCOMPLETE).exists() else None


def _number(folder: Path) -> int:
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1
