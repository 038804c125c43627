"""Checkpoints that transformers loads, made of our sizes and parameters."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dataserver.outputs import OutputError, whole_folder, writing
from dataserver.planning.job.fields import Sizing, SizingRule
from trainclient.models.hf.damaged_files import is_pointer
from trainclient.models.hf.files import INDEX, MAX_CONFIG_BYTES, WEIGHTS, PretrainedError, read_json
from trainclient.models.hf.folder import CONFIG, described
from trainclient.models.hf.mapping import Alone, Family, Sizes, spelled
from trainclient.models.hf.processors import PREPROCESSOR, processor_of
from trainclient.models.hf.registry import family_of
from trainclient.models.patches import pixel_statistics

GENERATION: Final = "generation_config.json"
TEMPLATE: Final = "chat_template.jinja"
COMPANIONS: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    TEMPLATE,
)
"""What comes along from the checkpoint that a model began as."""
MAX_COMPANION_BYTES: Final = 256 << 20
SHARD_BYTES: Final = 5 * 10**9
BILINEAR: Final = 2
"""What Pillow calls the filter that data servers scale images by."""
_PACKS: Final = {"Qwen2VLImageProcessor": SizingRule.QWEN, "Siglip2ImageProcessor": SizingRule.NAFLEX}
"""Processors of models that take packed patches, and their rules."""
_RANKS: Final = ("*.tiktoken", "*.pattern")
"""Tokenizers of tiktoken, and the patterns beside them."""
_SYSTEM: Final = re.compile(r"os error (\d{1,4})")


@dataclass(frozen=True, slots=True)
class Usage:
    """How a job uses a model, which its sizes do not say."""

    bos: int
    """Id of the first token of every sample."""
    eos: int
    """Id of the last one."""
    seq_len: int
    """Tokens of the longest sequence."""
    max_patches: int
    """Most patches of an image."""
    sizing: Sizing | None = None
    """How images are sized, where a rule says so."""


def export_pretrained(
    folder: Path,
    config: Sizes,
    state: Mapping[str, Tensor],
    base: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    usage: Usage | None = None,
    tokenizer: Path | None = None,
    built_in: bool = False,
) -> list[str]:
    """Write a checkpoint that transformers loads.

    Args:
        folder: is made, when it is complete; must not be there.
        config: the sizes of the module.
        state: its parameters, of the whole model.
        base: a checkpoint of the same architecture, whose tokenizer files and further fields of config.json come along.
        shard_bytes: largest file, as far as single tensors allow.
        usage: how it was trained. Without it and without a base a language model is refused: transformers would take
            ids of special tokens, and a longest sequence, that nobody gave.
        tokenizer: folder of another tokenizer than the base's, whose files come along instead.
        built_in: whether the job's tokenizer has no files: none are missing for new tokens, and the base's are not its.

    Returns:
        The names of the parameters that such checkpoints have no place for (query tokens; CLIP's and SigLIP's merger).

    Raises:
        PretrainedError: no architecture that is exported has these sizes, or parameters are missing or of other shapes.
        OutputError: the folder cannot be written; nothing of it is left.
    """
    family = family_of(config, "" if base is None else described(base, type(config))[0].name)
    if family.speaks and base is None and usage is None:
        raise PretrainedError(
            "the checkpoint does not say what its job's tokenizer and longest sequence are; give --base, the one that "
            "the module began as"
        )
    fields = _exported_config(family, config, state, base, usage)
    if base is not None and not built_in:
        known = getattr(family.read(*described(base, family.kind)[1:]), "vocab_size", 0)
        require_tokenizer(getattr(config, "vocab_size", 0), known, base, tokenizer)
    if os.path.lexists(folder):
        raise PretrainedError(f"{folder} is there already; give a folder that is not")
    tensors: dict[str, Tensor] = {}
    used: set[str] = set()
    for entry in family.entries(config):
        entry.require(state)
        used |= entry.ours.keys()
        ours = {name: state[name].cpu() for name in entry.ours}
        tensors[spelled(family.spellings[0], entry.theirs)] = entry.joined(ours)
    companions = {} if built_in else companions_of(base, tokenizer)
    with exported(folder) as made:
        _write_tensors(made, tensors, shard_bytes)
        (made / CONFIG).write_text(as_text(fields))
        if family.sees:
            (made / PREPROCESSOR).write_text(as_text(_exported_preprocessor(family, config, base, usage)))
        for name, path in companions.items():
            (made / name).write_bytes(path.read_bytes())
        if base is not None and (base / GENERATION).is_file():
            found = read_json(base / GENERATION, MAX_CONFIG_BYTES)
            (made / GENERATION).write_text(as_text({**found, **_ids(found, usage)}))
    return sorted(set(state) - used)


@contextmanager
def exported(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets that name when all is in it; OutputError, and nothing is left, where it cannot."""
    with writing("the folder", folder, "a folder that is not there,"):
        try:
            with whole_folder(folder) as made:
                yield made
        except SafetensorError as error:
            number = _SYSTEM.search(str(error))
            if number is None:
                raise OutputError(f"the folder {folder} cannot be written ({error})") from None
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None


def as_text(data: Mapping[str, Any]) -> str:
    """An object as people read it."""
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def _exported_config(
    family: Family[Any], config: Any, state: Mapping[str, Tensor], base: Path | None, usage: Usage | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if base is not None:
        like, fields, _ = described(base, family.kind)
        if like.name != family.name:
            raise PretrainedError(f"{base} is a {like.name}, and the model a {family.name}; give the one it began as")
        found = {**fields.data}
    if family.speaks and usage is not None:
        if not config.positions:
            theirs = found.get("max_position_embeddings")
            known = theirs if isinstance(theirs, int) else 0
            config = replace(config, positions=max(usage.seq_len, known))
        found |= _ids(found, usage)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.") if state else "float32"
    alone = _alone(family)
    written = {"architectures": [alone.architecture], "model_type": family.name, "dtype": dtype, "torch_dtype": dtype}
    sizes = alone.write(config)
    if "image_size" in sizes and (side := _side(config, usage)) is not None:
        sizes = {**sizes, "image_size": side}
    return {**found, **sizes, **written}


def _side(config: Any, usage: Usage | None) -> int | None:
    """Pixels of each side of all images of a job, where they make as many patches as an encoder has positions; its
    configuration says only how many whole patches that is."""
    if usage is None or usage.sizing is None or usage.sizing.side is None:
        return None
    return usage.sizing.side if usage.sizing.side // config.patch == config.position_grid else None


def _alone(family: Family[Any]) -> Alone:
    """How it is exported by itself, as `family_of` has found that it is."""
    if family.alone is None:
        raise TypeError(f"{family.name} is a part of models alone")
    return family.alone


def _ids(found: Mapping[str, Any], usage: Usage | None) -> dict[str, Any]:
    """Ids of special tokens: what the job trained with, beside further ends that `found` has. No job pads."""
    if usage is None:
        return {}
    theirs = found.get("eos_token_id")
    ends = [end for end in (theirs if isinstance(theirs, list) else [theirs]) if end is not None]
    known = usage.eos in ends
    return {
        "bos_token_id": usage.bos,
        "eos_token_id": theirs if known else [usage.eos, *ends] if ends else usage.eos,
        "pad_token_id": found.get("pad_token_id"),
    }


def _exported_preprocessor(family: Family[Any], config: Any, base: Path | None, usage: Usage | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mean, std = pixel_statistics(config.pixels)
    if base is not None and (base / PREPROCESSOR).is_file():
        found = read_json(base / PREPROCESSOR, MAX_CONFIG_BYTES)
    elif (processor := _alone(family).processor) is not None:
        scaling = {"do_convert_rgb": True, "do_resize": True, "resample": BILINEAR}
        values = {"do_normalize": True, "do_rescale": True, "rescale_factor": 1 / 255}
        found = scaling | values | processor(config, None if usage is None else usage.max_patches)
        if usage is not None and usage.sizing is not None:
            packs = _PACKS.get(found["image_processor_type"])
            found |= processor_of(usage.sizing, packs, config.position_grid, mean)
    return {**found, "image_mean": [*mean], "image_std": [*std]}


def _write_tensors(folder: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(as_text({"metadata": {"total_size": size}, "weight_map": weight_map}))


def companions_of(base: Path | None, tokenizer: Path | None = None) -> dict[str, Path]:
    """The files of a tokenizer that come along from a checkpoint, or from another tokenizer's folder; by their names.

    Only a chat template comes from the checkpoint where the other folder has none.

    Raises:
        PretrainedError: one is not what it should be, or the other folder has no tokenizer.
    """
    if tokenizer is not None and not tokenizer_files(tokenizer):
        raise PretrainedError(
            f"{tokenizer} has no tokenizer.json, tokenizer.model or NAME.tiktoken; give the folder of a tokenizer"
        )
    source = tokenizer or base
    paths = [] if source is None else [source / name for name in COMPANIONS]
    paths += [] if tokenizer is None else sorted(path for end in _RANKS for path in tokenizer.glob(end))
    paths += [] if base is None else [base / TEMPLATE]
    return {path.name: path for path in reversed(paths) if _is_whole(path)}


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that data servers read as a tokenizer, the first one unless another is named."""
    paths = [folder / "tokenizer.json", folder / "tokenizer.model", *sorted(folder.glob(_RANKS[0]))]
    return [path for path in paths if path.is_file()]


def require_tokenizer(tokens: int, known: int, base: Path, tokenizer: Path | None) -> None:
    """Refuse a model that knows more tokens than the checkpoint that it began as, whose tokenizer has none of them."""
    if tokens > known and tokenizer is None:
        raise PretrainedError(
            f"the model knows {tokens} tokens, and {base} knows {known}; give --tokenizer, the folder of the tokenizer "
            "that data servers had, or that of the base where only rows were added"
        )


def _is_whole(path: Path) -> bool:
    """Whether a file is there to come along; PretrainedError where it is none that should."""
    if not path.is_file():
        return False
    if path.stat().st_size > MAX_COMPANION_BYTES:
        raise PretrainedError(f"{path} is larger than {MAX_COMPANION_BYTES} bytes; no tokenizer is")
    if is_pointer(path):
        raise PretrainedError(f"{path} is a pointer of git-lfs; run `git lfs pull` in its repository")
    return True
