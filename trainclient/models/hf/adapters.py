"""Low-rank adapters as peft writes and reads them: `adapter_config.json` and `adapter_model.safetensors`."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from trainclient.models.hf.exporting import as_text, exported
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.folder import described
from trainclient.models.hf.mapping import Sizes
from trainclient.models.hf.registry import family_of
from trainclient.models.lora import LowRank, adapter_pairs

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(
    folder: Path, config: Sizes, state: Mapping[str, Tensor], adapters: LowRank, base: Path | None = None
) -> list[str]:
    """Write the adapters of a module alone.

    Args:
        folder: is made, when it is complete; must not be there.
        config: the sizes of the module.
        state: its parameters, of the whole model.
        adapters: what it has.
        base: the checkpoint that it began as, which the folder then names.

    Returns:
        The names of the parameters that were trained beside adapters, and that they have no place for.

    Raises:
        PretrainedError: no language model that is exported has these sizes, or the folder is there.
        OutputError: the folder cannot be written; nothing of it is left.
    """
    if os.path.lexists(folder):
        raise PretrainedError(f"{folder} is there already; give a folder that is not")
    family = family_of(config, "" if base is None else described(base, type(config))[0].name)
    if not family.speaks:
        raise PretrainedError(
            f"adapters are written of language models alone, and this is a {family.name}; leave --adapter out, which "
            "merges them"
        )
    there = {f"{layer}.weight": (down, up) for layer, down, up in adapter_pairs(state)}
    tensors, parts = {}, dict[str, int]()
    for entry in family.entries(config):
        pairs = [there.get(ours) for ours in entry.ours]
        if any(pair is not None for pair in pairs):
            theirs = entry.theirs.removesuffix(".weight")
            parts[theirs.rpartition(".")[2]] = sum(pair is not None for pair in pairs)
            for name, weight in zip(("lora_A", "lora_B"), _joined(pairs, [*entry.ours.values()]), strict=True):
                tensors[f"base_model.model.{theirs}.{name}.weight"] = weight
    several = {name: count for name, count in parts.items() if count > 1}
    patterns = {
        "rank_pattern": {name: count * adapters.rank for name, count in several.items()},
        "alpha_pattern": {name: count * adapters.alpha for name, count in several.items()},
    }
    written = {
        "base_model_name_or_path": None if base is None else str(base),
        "bias": "none",
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": sorted(parts),
        "task_type": "CAUSAL_LM",
        **(patterns if several else {}),
    }
    with exported(folder) as made:
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        (made / CONFIG).write_text(as_text(written))
    return [name for name in ("query.weight",) if name in state]


def _joined(pairs: Sequence[tuple[Tensor, Tensor] | None], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One adapter for layers whose weights lie one below the other, [sum of ranks, in] and [sum of rows, sum of ranks].

    Args:
        pairs: the adapter of each layer, [rank, in] and [rows, rank]; None where it has none.
        rows: of each layer.
    """
    there = [pair for pair in pairs if pair is not None]
    down = torch.cat([pair[0] for pair in there])
    up = there[0][1].new_zeros(sum(rows), len(down))
    row = column = 0
    for pair, count in zip(pairs, rows, strict=True):
        if pair is not None:
            up[row : row + count, column : column + pair[1].shape[1]] = pair[1]
            column += pair[1].shape[1]
        row += count
    return down, up
