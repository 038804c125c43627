"""A whole model back into the form of the folder that it began as: the same files, names and configuration."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from dataserver.planning.job.fields import Sizing
from trainclient.models.hf.exporting import GENERATION, as_text, companions_of, exported, require_tokenizer
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.files import (
    INDEX,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    PretrainedError,
    TensorFiles,
    read_json,
)
from trainclient.models.hf.folder import CONFIG, EMBEDDING, HEAD, part_of, stored_names
from trainclient.models.hf.mapping import Entry, Family, Sizes
from trainclient.models.hf.processors import PREPROCESSOR, PROCESSOR, processor_fields, tiled_fields, with_bounds_of
from trainclient.models.hf.registry import families_of

PROCESSORS: Final = (PREPROCESSOR, PROCESSOR, "video_preprocessor_config.json", "chat_template.json")
_VOCABULARY: Final = "vocab_size"
_OF_THE_JOB: Final = frozenset({"positions", "pixels", "query_tokens", _VOCABULARY})
"""Sizes that a job may change: all but the last change no weight of the checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedPart:
    """An encoder or a backbone that began as a part of a whole model."""

    config: Sizes
    state: Mapping[str, Tensor]
    """Its parameters, of the whole module."""


def export_whole(
    folder: Path,
    base: Path,
    parts: Sequence[TrainedPart],
    dtype: torch.dtype | None = None,
    sizing: Sizing | None = None,
    tokenizer: Path | None = None,
    built_in: bool = False,
) -> list[str]:
    """Write a model with the files, names and configuration of the checkpoint that it began as.

    Tensors that no part holds come along as they are: layers behind the one whose features are taken, heads of towers.

    Args:
        folder: is made, when it is complete; must not be there.
        base: the checkpoint.
        parts: at most one of each kind; what the model has beside them stays as in the checkpoint.
        dtype: of all tensors; by default that of the first part.
        sizing: of the job, where it names a rule: processors of that rule get its bounds and filter.
        tokenizer: folder of another tokenizer than the checkpoint's, whose files come along instead.
        built_in: whether the job's tokenizer has no files: none are missing for new tokens, and the base's are not its.

    Returns:
        The names of the parameters that the checkpoint has no place for (query tokens).

    Raises:
        PretrainedError: the checkpoint cannot be read, or a part did not begin as it.
        OutputError: the folder cannot be written; nothing of it is left.
    """
    whole = Fields(read_json(base / CONFIG, MAX_CONFIG_BYTES), str(base / CONFIG))
    if os.path.lexists(folder):
        raise PretrainedError(f"{folder} is there already; give a folder that is not")
    dtype = dtype or next(tensor.dtype for part in parts for tensor in part.state.values())
    with TensorFiles(base) as files:
        trained: dict[str, tuple[Entry, TrainedPart]] = {}
        config = dict(whole.data)
        left: list[str] = []
        for part in parts:
            family = _family(families_of(whole), part, base)
            theirs = family.read(part_of(whole, family), whole)
            entries = _entries(family, part, theirs, base)
            known, tokens = (getattr(sizes, _VOCABULARY, 0) for sizes in (theirs, part.config))
            if not built_in:
                require_tokenizer(tokens, known, base, tokenizer)
            stored = stored_names(base, files, family, theirs)
            trained |= {stored[entry.theirs]: (entry, part) for entry in entries}
            if getattr(part.config, "tied", False) and HEAD in stored:
                trained[stored[HEAD]] = trained[stored[EMBEDDING]]
            left += sorted(set(part.state) - {name for entry in entries for name in entry.ours})
            config = _enlarged(config, family, theirs, part.config)
        others = {name: base / name for name in (*PROCESSORS, GENERATION) if (base / name).is_file()}
        companions = others if built_in else others | companions_of(base, tokenizer)
        resized = {} if sizing is None else _resized(base, sizing)
        if sizing is not None:
            tiled = tiled_fields(sizing, processor_fields(base))
            config |= {name: value for name, value in tiled.items() if name in config}
        with exported(folder) as made:
            _write(made, base, files, trained, dtype)
            (made / CONFIG).write_text(as_text(_typed(config, str(dtype).removeprefix("torch."))))
            for name, path in companions.items():
                (made / name).write_bytes(path.read_bytes())
            for name, data in resized.items():
                (made / name).write_text(as_text(data))
    return left


def _resized(base: Path, sizing: Sizing) -> dict[str, dict[str, Any]]:
    """The files of a checkpoint that say how images are sized, where a job does so otherwise."""
    found = {name: read_json(base / name, MAX_CONFIG_BYTES) for name in PROCESSORS[:2] if (base / name).is_file()}
    changed: dict[str, dict[str, Any]] = {}
    for name, data in found.items():
        fields, inner = Fields(data, str(base / name)), "image_processor"
        if name == PREPROCESSOR:
            changed[name] = with_bounds_of(sizing, fields)
        elif fields.has(inner):
            processor = fields.within(inner)
            cut = {key: value for key, value in tiled_fields(sizing, processor).items() if key in data}
            changed[name] = {**data, **cut, inner: with_bounds_of(sizing, processor)}
    return {name: data for name, data in changed.items() if data != found[name]}


def _family(families: Sequence[Family[Any]], part: TrainedPart, base: Path) -> Family[Any]:
    """The part of the checkpoint that a module is."""
    found = next((family for family in families if family.kind is type(part.config)), None)
    if found is None:
        raise PretrainedError(f"{base} is a {families[0].name} alone, and the job has more; give --module, one of them")
    return found


def _entries(family: Family[Any], part: TrainedPart, theirs: Any, base: Path) -> list[Entry]:
    """The entries of a part, after it was compared with that of the checkpoint; it may know more tokens."""
    tokens = {name: getattr(part.config, name) for name in (_VOCABULARY,) if hasattr(theirs, name)}
    names = [field.name for field in fields(theirs) if field.name not in _OF_THE_JOB]
    different = [
        f"{name} {getattr(part.config, name)!r}, not {getattr(theirs, name)!r}"
        for name in names
        if getattr(part.config, name) != getattr(theirs, name)
    ]
    different += [f"{name} {n}, not {getattr(theirs, name)}" for name, n in tokens.items() if n < getattr(theirs, name)]
    if different:
        raise PretrainedError(f"the module has {', '.join(different)} as {base}; give the folder that it began as")
    entries = family.entries(replace(theirs, **tokens))
    for entry in entries:
        entry.require(part.state)
    return entries


def _enlarged(config: dict[str, Any], family: Family[Any], theirs: Any, ours: Any) -> dict[str, Any]:
    """The configuration with the longest sequence that a part has learned, and the tokens that it knows."""
    told = {"positions": "max_position_embeddings", _VOCABULARY: _VOCABULARY}
    grown = {
        field: value
        for name, field in told.items()
        if (value := getattr(ours, name, 0)) and value != getattr(theirs, name)
    }
    inner = config.get(family.section)
    if not isinstance(inner, dict):
        return config | grown
    repeated = {field: value for field, value in grown.items() if field in config}
    return config | {family.section: inner | grown} | repeated


def _typed(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration whose tensors have that type, wherever it says one."""
    found = {name: _typed(value, dtype) if isinstance(value, dict) else value for name, value in config.items()}
    return found | {name: dtype for name in ("dtype", "torch_dtype") if isinstance(found.get(name), str)}


def _write(
    folder: Path, base: Path, files: TensorFiles, trained: Mapping[str, tuple[Entry, TrainedPart]], dtype: torch.dtype
) -> None:
    """Write tensors into files of the names that the checkpoint has, one file after the other."""
    by_file: dict[str, list[str]] = {}
    for name in files:
        by_file.setdefault(files.file(name), []).append(name)
    size = 0
    for file, names in by_file.items():
        tensors = dict(_tensors(names, files, trained, dtype))
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if (base / INDEX).is_file():
        index = read_json(base / INDEX, MAX_INDEX_BYTES)
        metadata = index.get("metadata")
        metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": size}
        (folder / INDEX).write_text(as_text({**index, "metadata": metadata}))


def _tensors(
    names: Sequence[str], files: TensorFiles, trained: Mapping[str, tuple[Entry, TrainedPart]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        if name in trained:
            entry, part = trained[name]
            yield name, entry.joined({ours: part.state[ours].cpu() for ours in entry.ours}).to(dtype)
        else:
            tensor = files.read_untouched(name)
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
