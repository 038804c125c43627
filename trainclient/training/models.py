"""The models of a run: their sizes, and those that a process holds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.spec import JobSpec
from trainclient.exchange.message_header import Kind
from trainclient.models.backbone import stage_layers
from trainclient.models.compiling import compile_blocks
from trainclient.models.lora import LowRank, adapt
from trainclient.models.parameters import initialise
from trainclient.modules import Site, Sizes, TrainedModule, family_of, own
from trainclient.topology.process_grid import Chunk, GridProcess, Topology
from trainclient.training.config import ConfigError, TrainConfig
from trainclient.training.freezing import freeze_tower, frozen_parts, require_freezable
from trainclient.training.model_config import (
    NOT_MODEL,
    NOT_SIZES,
    BackboneModel,
    EncoderModel,
    GeneratorModel,
    LoraConfig,
    Sharding,
)
from trainclient.training.pretrained import (
    GROWING,
    load_pretrained_into,
    pretrained_sizes,
    require_its_tokenizer,
    sizing_note,
)


@dataclass(frozen=True, slots=True)
class Models:
    """What every module of a job is."""

    config: TrainConfig
    job: JobSpec
    row_width: int
    """Width of the rows that the backbone gives, and takes but for images; of towers, of their features."""
    sizes: dict[str, Sizes]
    """Sizes by the names of the modules; those of the user's own have none."""

    @classmethod
    def of(cls, config: TrainConfig, job: JobSpec) -> "Models":
        """The models that a configuration asks for, fitted to the job.

        Raises:
            ValueError: an unknown preset or module, sizes that do not fit each other, or more stages than layers.
        """
        modules = job.execution.modules
        unknown = set(config.modules) - {m.name for m in modules}
        if unknown:
            raise ConfigError(
                f"modules names {sorted(unknown)}, which are not in the job; it has {[m.name for m in modules]}"
            )
        staged = [m for m in modules if family_of(m).staged]
        for m in staged:
            if _own(config, m):
                raise ConfigError(f"modules.{m.name}.use is given, but a {m.kind} of one's own cannot be used yet")
        for m in modules:
            if _own(config, m) and config.modules[m.name].sharding is Sharding.ZERO3:
                raise ConfigError(
                    f"modules.{m.name}.sharding is zero3, in which ranks wait for each other in every block, and of a "
                    "module of one's own nothing says that all run the same ones; zero2 is possible"
                )
            _require_trainable(config, m)
        width = next((_sizes(config, job, m, 0).width for m in staged if family_of(m).spine), None)
        between = width or config.contrastive.features
        found = {m.name: _sizes(config, job, m, between) for m in modules if not _own(config, m)}
        for m in staged:
            num_chunks = job.execution.layout.num_chunks
            stage_layers(found[m.name].layers, 0, m.pp * num_chunks)
            if getattr(found[m.name], "tied", False) and m.pp == 1 < num_chunks:
                raise ConfigError(
                    f"module {m.name} has pp 1 and {num_chunks} chunks, which would part its head from its embedding "
                    "(tie_word_embeddings); set the chunks of the layout to 1"
                )
        _require_image_rows(modules, found)
        for m in modules:
            if family_of(m).spine:
                _require_shared_heads(m, found[m.name], max(job.execution.layout.group_degrees, default=1))
            if m.name in found:
                _require_parts(m, found[m.name])
        made = cls(config, job, between, found)
        for name in [m.name for m in modules if low_rank(config, m) is not None or _freezes_tower(config, m)]:
            made.shaped(made._first_chunk(name))  # refuses targets and projectors that are not there
        return made

    def describe(self) -> dict[str, Any]:
        """Every module as plain values: what a checkpoint must agree with, whoever holds which share of it."""
        found: dict[str, Any] = {}
        for m in self.job.execution.modules:
            named = self.config.modules.get(m.name)
            given = named and named.model_dump(mode="json", exclude=set(NOT_MODEL))
            what = _plain(asdict(self.sizes[m.name])) if m.name in self.sizes else given
            found[m.name] = {"kind": str(m.kind), **(what or {})}
            adapters = low_rank(self.config, m)
            if adapters is not None:
                found[m.name]["lora"] = asdict(adapters)
        return found

    def sharding(self, module: ModuleSpec) -> Sharding:
        """How the replicas of a module share its parameters; one alone has nobody to share them with."""
        return _model(self.config, module).sharding if module.replicas > 1 else Sharding.NONE

    def shardings(self, process: GridProcess) -> dict[str, Sharding]:
        """That of each module of a process."""
        return {m.name: self.sharding(m) for m in process.modules}

    def build(self, process: GridProcess, device: torch.device) -> tuple[tuple[Site, TrainedModule], ...]:
        """What a process holds, chunk by chunk, with its initial values; before it is sharded or split, on the CPU."""
        whole = torch.device("cpu")  # it may not fit the device, and its shares move there
        shared = {m.name for m in process.modules if m.tp > 1 or self.sharding(m) is not Sharding.NONE}
        return tuple(self._build(c, whole if c.module.name in shared else device, device) for c in process.chunks)

    def _build(self, chunk: Chunk, device: torch.device, computes_on: torch.device) -> tuple[Site, TrainedModule]:
        config, module = self.config, chunk.module
        site, made = self.shaped(chunk)
        made.network.to(config.dtype.torch)
        if _own(config, module):
            made.network.to(device)
        else:
            made.network.to_empty(device=device)
            if config.compile:
                compile_blocks(made.network, computes_on, config.dtype.torch)
        initialise(made.network, config.seed, module.name)
        weights = _weights(config, module)
        if weights is not None:
            load_pretrained_into(made.network, weights, module)
        if module.frozen:
            made.network.eval()
        return site, made

    def shaped(self, chunk: Chunk) -> tuple[Site, TrainedModule]:
        """A chunk whose parameters have shapes, and are marked as trained or not, but have no memory or values yet;
        those of the user's own have what they come with."""
        config, module = self.config, chunk.module
        inner = family_of(module).rows is Kind.ACTIVATIONS  # those between its own chunks
        width = self.sizes[module.name].width if inner else self.row_width
        spine = next((m.name for m in self.job.execution.modules if family_of(m).spine), None)
        backbone: Any = None if spine is None else self.sizes[spine]
        images = self.row_width if backbone is None else backbone.image_width
        if family_of(module).rows is Kind.EMBEDDINGS:
            width = images
        takes_images = module.name == spine and chunk.is_first
        site = Site(self.job, module, width, chunk.number, chunk.count, images if takes_images else 0)
        named = config.modules.get(module.name)
        if named is not None and named.use is not None:
            made = own(named.use, site, named.options)
            if module.recompute and not made.recomputes:
                raise ConfigError(
                    f"the job has module {module.name} compute its blocks again (recompute), which {named.use} cannot; "
                    "leave recompute out, or see to it (site.module.recompute) and set its recomputes to True"
                )
        else:
            with torch.device("meta"):
                made = family_of(module).make(site, self.sizes[module.name])
                adapters = low_rank(config, module)
                if adapters is not None:
                    try:
                        adapt(made.network, adapters)
                    except ValueError as error:
                        raise ConfigError(f"lora.targets of module {module.name} {error}") from None
                    made.trains_weights = False
        if _freezes_tower(config, module):
            freeze_tower(made, module.name)
        if module.frozen:
            made.network.requires_grad_(requires_grad=False)
        return site, made

    def frozen(self) -> list[str]:
        """What is not trained: modules of the job, and parts of those whose projector is trained alone."""
        found = [m.name for m in self.job.execution.modules if m.frozen]
        towers = [m.name for m in self.job.execution.modules if _freezes_tower(self.config, m)]
        for name in towers:
            found += frozen_parts(self.shaped(self._first_chunk(name))[1].network, name)
        return found

    def _first_chunk(self, name: str) -> Chunk:
        """The first chunk of a module."""
        chunks = (chunk for process in Topology.of(self.job).processes for chunk in process.chunks)
        return next(chunk for chunk in chunks if chunk.module.name == name)


def weight_notes(config: TrainConfig, job: JobSpec) -> list[str]:
    """What to change in a job for the images that its checkpoints were trained on, a line each."""
    named = ((module, _weights(config, module)) for module in job.execution.modules)
    there = [(module, folder) for module, folder in named if folder is not None]
    found = (sizing_note(folder, job, module) for module, folder in there)
    return [note for note in found if note is not None]


def _plain(value: Any) -> Any:
    """Sizes as they come back from JSON."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value


def low_rank(config: TrainConfig, module: ModuleSpec) -> LowRank | None:
    """The adapters of a module; None if it has none."""
    lora: LoraConfig = getattr(_model(config, module), "lora", LoraConfig())  # a generator has none
    return LowRank(lora.rank, lora.alpha, [str(target) for target in lora.targets]) if lora.rank else None


def _freezes_tower(config: TrainConfig, module: ModuleSpec) -> bool:
    """Whether the projector of a module is trained alone."""
    return bool(getattr(_model(config, module), "freeze_tower", False))


def _require_trainable(config: TrainConfig, module: ModuleSpec) -> None:
    """Raise ConfigError if a module is to have adapters, or a frozen tower, that it cannot have."""
    adapted = low_rank(config, module) is not None
    if _freezes_tower(config, module):
        require_freezable(module, adapted=adapted)
    if not adapted:
        return
    reasons = {
        f"is of kind {module.kind}, which has none": not family_of(module).adaptable,
        "is of your own (use), and blocks that come with the trainer alone have them": _own(config, module),
        "is frozen; leave frozen out, since adapters freeze its weights": module.frozen,
        "has vocabulary, and adapters leave the embeddings of tokens as they are, so that new ones would never be "
        "learned; leave one of them out": getattr(_model(config, module), "vocabulary", None) is not None,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise ConfigError(f"module {module.name} has lora adapters, but {reason}")


def _require_image_rows(modules: Sequence[ModuleSpec], sizes: Mapping[str, Any]) -> None:
    """Raise ConfigError unless encoders make the rows that the backbone takes for images."""
    backbone = next((m.name for m in modules if family_of(m).spine), None)
    for m in modules if backbone is not None else ():
        made, wanted = getattr(sizes.get(m.name), "row_width", None), sizes[backbone or ""].image_width
        if family_of(m).rows is Kind.EMBEDDINGS and made is not None and made != wanted:
            raise ConfigError(
                f"module {m.name} makes rows of width {made}, and {backbone} takes rows of width {wanted} for images "
                f"(its width {sizes[backbone or ''].width}, times one more than its deepstack); start both from the "
                "same checkpoint"
            )


def _require_parts(module: ModuleSpec, sizes: Sizes) -> None:
    """Raise ConfigError unless tensor-parallel ranks, and those that share sequences, can have equal parts of a
    module's layers."""
    for field, keys in (("heads", ("tp", "sp")), ("groups", ("tp", "sp")), ("mlp_width", ("tp",))):
        used = {key: degree for key in keys if (degree := getattr(module, key)) > 1}
        size = getattr(sizes, field, 0)
        if size % prod(used.values()):
            raise ConfigError(
                f"module {module.name} has {' x '.join(f'{key} {degree}' for key, degree in used.items())} and {field} "
                f"{size}, which ranks cannot split evenly; set {' x '.join(used)} to a divisor of {size}"
            )


def _require_shared_heads(module: ModuleSpec, sizes: Sizes, degree: int) -> None:
    """Raise ConfigError unless ranks of a group of that degree can attend with equal parts of a backbone's heads."""
    for field in ("heads", "groups"):
        heads = getattr(sizes, field)
        if heads % degree:
            raise ConfigError(
                f"module {module.name} has {field} {heads}, which {degree} ranks that share sequences cannot split "
                f"evenly; set layout.max_degree to at most {heads & -heads}, or {field} to a multiple of {degree}"
            )


def _own(config: TrainConfig, module: ModuleSpec) -> bool:
    """Whether a module is of the user's own."""
    named = config.modules.get(module.name)
    return named is not None and named.use is not None


def _model(config: TrainConfig, module: ModuleSpec) -> EncoderModel | BackboneModel | GeneratorModel:
    """What the configuration says of a module: by its name, or else of its kind."""
    found: EncoderModel | BackboneModel | GeneratorModel = getattr(config, family_of(module).section)
    return config.modules.get(module.name, found)


def _weights(config: TrainConfig, module: ModuleSpec) -> Path | None:
    """The checkpoint that a module starts from."""
    own: Path | None = getattr(_model(config, module), "weights", None)  # a generator has none
    whole = config.models.folder if family_of(module).in_whole else None
    return whole if own is None else own


def _sizes(config: TrainConfig, job: JobSpec, module: ModuleSpec, width: int) -> Sizes:
    """The sizes of one module."""
    model = _model(config, module)
    given = model.model_dump(exclude=set(NOT_SIZES), exclude_none=True)
    loss: dict[str, Any] = {"loss": config.contrastive.loss} if module.makes_features else {}
    weights = _weights(config, module)
    if weights is not None:
        grown = {name: given.pop(name) for name in GROWING if name in given}
        if given:
            raise ConfigError(f"module {module.name} has weights and {sorted(given)}; weights bring their own sizes")
        found = pretrained_sizes(weights, job, module, width, grown)
        if "vocabulary" not in grown and not getattr(model, "other_tokenizer", False):
            require_its_tokenizer(weights, job, module)
        return replace(found, **loss)
    sizes = family_of(module).sizes(model.preset, job, width)
    wrong = given.keys() - {f.name for f in fields(sizes)}
    if wrong:
        raise ConfigError(f"modules.{module.name} gives {sorted(wrong)}, which modules of kind {module.kind} lack")
    positions = given.get("positions", job.stream.seq_len)
    if positions < job.stream.seq_len:
        raise ConfigError(
            f"module {module.name} has positions {positions}, and the job's seq_len is {job.stream.seq_len}; leave "
            "positions out, or raise it"
        )
    return replace(sizes, **given, **loss)
