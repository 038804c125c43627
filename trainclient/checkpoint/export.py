"""`trainclient export`: a module of a checkpoint as a folder that transformers loads."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import tyro
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from dataserver.planning.job.fields import Stream
from trainclient.checkpoint.folder import explained, stored_tensors
from trainclient.checkpoint.selection import newest
from trainclient.checkpoint.state import CheckpointError, TrainerState, is_state, read_manifest
from trainclient.checkpoint.sums import damages
from trainclient.models.audio_encoder import AudioEncoderConfig
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf import (
    TrainedPart,
    Usage,
    export_adapter,
    export_pretrained,
    export_whole,
    tokenizer_files,
)
from trainclient.models.lora import LowRank, merged
from trainclient.models.rotary import RotaryScaling, RotarySections
from trainclient.modules import exported_as, parts_of_whole

_NESTED: Final = {"rotary_scaling": RotaryScaling, "sections": RotarySections}
"""Fields of sizes that are objects of their own."""
BUILT_IN: Final = "bytes"
"""Name of the tokenizer that data servers have without a file; no other one is called so."""


class ExportType(StrEnum):
    """Types that exported weights may have."""

    STORED = "stored"
    """Types as the checkpoint has them: float32 for runs in bfloat16."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """Which checkpoint to export, and where to."""

    checkpoint: Annotated[Path, tyro.conf.arg(help_behavior_hint="(required)")]
    """A checkpoint (step-N), or a folder of checkpoints, whose newest is exported."""
    output: Annotated[Path, tyro.conf.arg(help_behavior_hint="(required)")]
    """Folder to write; it must not exist yet."""
    module: Annotated[str | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Name of an encoder, a backbone or an image tower of the job. Without it, encoder and backbone are exported as the
    whole model --base from which they started."""
    base: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Folder of the released model from which the module started; its tokenizer files and further fields of config.json
    are added."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Folder of the tokenizer that the data servers used, if it is not the base's; its files replace those of the base.
    Needed if the model has learned new tokens."""
    adapter: bool = False
    """Write only the low-rank adapters of a module, as peft reads them; without this flag they are merged into the
    weights."""
    dtype: ExportType = ExportType.STORED
    """Type of the weights: stored (float32 for runs in bfloat16), float32 or bfloat16."""


def export(config: ExportConfig) -> list[str]:
    """Export a module or a whole model; returns what such a checkpoint has no place for.

    Raises:
        ValueError: there is no such checkpoint or module, or no architecture that is exported is like it.
    """
    path = newest(config.checkpoint)
    manifest = read_manifest(path)
    if found := damages(path, manifest.files or {}):
        raise CheckpointError(f"the checkpoint {path} is damaged ({'; '.join(found[:4])}); export an older one")
    saved = manifest.state
    if config.adapter and config.tokenizer is not None:
        raise CheckpointError("--adapter writes no tokenizer; leave --tokenizer out, or --adapter")
    stream = _stream(saved)
    _require_its_tokenizer(config.tokenizer, stream)
    built_in = stream is not None and stream.tokenizer.name == BUILT_IN
    if config.module is None:
        return _export_whole(config, path, saved.modules, _usage(stream), built_in)
    if config.module not in saved.modules:
        there = ", ".join(sorted(saved.modules))
        raise CheckpointError(f"the checkpoint {path} has no module {config.module}; it has {there}")
    described = saved.modules[config.module]
    sizes, state = _read_module(path, config.module, described)
    adapters = _adapters(described)
    if config.adapter and adapters is None:
        raise CheckpointError(f"module {config.module} has no lora adapters; export it without --adapter")
    if adapters is not None and not config.adapter:
        state = merged(state, adapters)
    dtype = _dtype(config)
    if dtype is not None:
        state = {name: tensor.to(dtype) for name, tensor in state.items()}
    if adapters is not None and config.adapter:
        return export_adapter(config.output, sizes, state, adapters, base=config.base)
    return export_pretrained(
        *(config.output, sizes, state),
        base=config.base,
        usage=_usage(stream),
        tokenizer=config.tokenizer,
        built_in=built_in,
    )


def _export_whole(
    config: ExportConfig, path: Path, modules: Mapping[str, Any], usage: Usage | None, built_in: bool
) -> list[str]:
    """Export the encoder and the backbone of a job as the model that they began as."""
    if config.base is None or config.adapter:
        what = "--adapter writes those of one module" if config.adapter else "a whole model needs --base"
        raise CheckpointError(
            f"{what}; give --module, one of {', '.join(sorted(modules))}, or --base without --adapter"
        )
    parts = []
    for kind, names in parts_of_whole(modules).items():
        if len(names) > 1:
            raise CheckpointError(f"the checkpoint has {len(names)} of kind {kind} ({', '.join(names)}); give --module")
        for name in names:
            sizes, state = _read_module(path, name, modules[name])
            adapters = _adapters(modules[name])
            parts.append(TrainedPart(sizes, state if adapters is None else merged(state, adapters)))
    if not parts:
        raise CheckpointError(f"the checkpoint {path} has neither encoder nor backbone; give --module")
    sizing = None if usage is None else usage.sizing
    return export_whole(config.output, config.base, parts, _dtype(config), sizing, config.tokenizer, built_in)


def _require_its_tokenizer(folder: Path | None, stream: Stream | None) -> None:
    """Raise CheckpointError where a folder has another tokenizer than the job of a checkpoint."""
    if folder is None or stream is None:
        return
    name, digest = stream.tokenizer.name, stream.tokenizer.digest
    if name == BUILT_IN:
        raise CheckpointError(f"the tokenizer {name} of the job is built in and has no files; leave --tokenizer out")
    from dataserver.assembly import tokenizer_digest  # most exports name no tokenizer

    others = []
    for path in tokenizer_files(folder):
        found = tokenizer_digest(name, path)
        if found == digest:
            return
        others.append(f"{path} has the SHA-256 {found[:16]}...")
    if others:
        raise CheckpointError(
            f"{', '.join(others)}, and the tokenizer {name} of the job {digest[:16]}...; give the folder that data "
            "servers had"
        )


def _dtype(config: ExportConfig) -> torch.dtype | None:
    """The type that is asked for; None: as stored."""
    found: torch.dtype | None = None if config.dtype is ExportType.STORED else getattr(torch, config.dtype)
    return found


def _read_module(
    path: Path, name: str, described: Mapping[str, Any]
) -> tuple[EncoderConfig | AudioEncoderConfig | BackboneConfig, dict[str, Tensor]]:
    """The sizes and the parameters of a module, by their names in exports."""
    sizes, names = _sizes(name, described)
    return sizes, {names.get(ours, ours): tensor for ours, tensor in _read(path, name).items()}


def _usage(stream: Stream | None) -> Usage | None:
    """How the job of a checkpoint used its models; None where its stream does not say."""
    if stream is None:
        return None
    tokenizer, sizing = stream.tokenizer, stream.sizing
    named = sizing if sizing.rule else None
    return Usage(tokenizer.bos, tokenizer.eos, stream.seq_len, sizing.max_patches, named)


def _stream(saved: TrainerState) -> Stream | None:
    """The stream of a checkpoint's job, where the checkpoint says it."""
    try:
        return Stream.model_validate_json(saved.cursor["stream"])
    except (KeyError, ValueError):
        return None


def _adapters(described: Mapping[str, Any]) -> LowRank | None:
    """The adapters that a checkpoint describes."""
    return LowRank(**described["lora"]) if "lora" in described else None


def _sizes(
    name: str, described: Mapping[str, Any]
) -> tuple[EncoderConfig | AudioEncoderConfig | BackboneConfig, Mapping[str, str]]:
    """The sizes that a checkpoint describes, and the parameters that are exported by other names."""
    fields = {key: value for key, value in described.items() if key not in ("kind", "lora", "loss")}
    found = exported_as(described)
    if found is None:
        raise CheckpointError(
            f"module {name} is a {described['kind']}; encoders, backbones, and image towers with learned positions are "
            "exported"
        )
    try:
        for key, made in _NESTED.items():
            if fields.get(key):
                fields[key] = made(**_tuples(fields[key]))
        fields = _tuples(fields)
        return found.source(**fields), found.names
    except TypeError:
        raise CheckpointError(
            f"module {name} has sizes {sorted(fields)}; a module of your own, or of another release, is not exported"
        ) from None


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Values as sizes have them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def _read(path: Path, module: str) -> dict[str, Tensor]:
    """The parameters of a module, by their names in it."""
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored_tensors(path).items()
        if name.startswith(f"{module}.") and not is_state(name)
    }
    ignored = warnings.catch_warnings(action="ignore", category=UserWarning)  # torch warns of what no_dist asks for
    with explained(f"the checkpoint {path} cannot be read"), ignored:
        load(tensors, checkpoint_id=path, no_dist=True)
    return {name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items()}
