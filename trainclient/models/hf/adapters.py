"""Low-rank adapters as peft writes and reads them: `adapter_config.json` and `adapter_model.safetensors`."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from trainclient.models.hf.exporting import as_text, exported
from trainclient.models.hf.files import PretrainedError
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
        PretrainedError: no architecture that is exported has these sizes, or the folder is there.
        OutputError: the folder cannot be written; nothing of it is left.
    """
    if os.path.lexists(folder):
        raise PretrainedError(f"{folder} is there already; give a folder that is not")
    family = family_of(config)
    names = {ours: entry.theirs for entry in family.entries(config) for ours in entry.ours}
    tensors, targets = {}, set()
    for layer, down, up in adapter_pairs(state):
        theirs = names[f"{layer}.weight"].removesuffix(".weight")
        targets.add(theirs.rpartition(".")[2])
        for part, weight in (("lora_A", down), ("lora_B", up)):
            tensors[f"base_model.model.{theirs}.{part}.weight"] = weight.contiguous()
    described = {
        "base_model_name_or_path": None if base is None else str(base),
        "bias": "none",
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
    }
    with exported(folder) as made:
        save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
        (made / CONFIG).write_text(as_text(described))
    return [name for name in ("query.weight",) if name in state]
