"""The job specification: what a job trains on (its stream) and how it runs (its execution).

A JobSpec is written as YAML or JSON, travels as JSON, and is identified by hashes of its canonical JSON (`identity`).
There is one definition, this one; `protos/disttrain/v1/job_spec.schema.json` is generated from it for other languages.
No floats: fractions are decimal strings, times are integers.
"""

from dataclasses import asdict
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from dataserver.planning.costs import hardware

MAX_INTEGER = 2**53 - 1
"""Largest integer that every JSON implementation carries exactly (RFC 8785, section 3.2.2.3)."""

SUPPORTED_ORDER_VERSIONS = frozenset({1})
SUPPORTED_CONTENT_VERSIONS = frozenset({1})
SUPPORTED_PLAN_VERSIONS = frozenset({1})


def _decimal(text: str) -> str:
    """The shortest spelling of a non-negative decimal, so that equal fractions hash equally."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"found {text!r}; a decimal string such as '0.97' is required") from None
    if not value.is_finite() or value.is_signed() or len(text) > 32 or abs(value.adjusted()) > 18:
        raise ValueError(f"found {text!r}; a decimal in [0, 10^18] with at most 32 characters is required")
    plain = format(value, "f")
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain) or "0"


DecimalString = Annotated[str, AfterValidator(_decimal)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Natural = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, use_attribute_docstrings=True)


class DatasetSpec(_Model):
    """One dataset of the mixture."""

    name: Name
    """Logical name; each server's own configuration says where the dataset lies."""
    fingerprint: Digest
    """Fingerprint that `dataserver index` prints: a copy elsewhere has the same one."""
    weight: DecimalString = "1"
    """Share of the step's tokens (of its samples without packing), relative to the other weights."""
    filter: Annotated[str, Field(max_length=4096)] = ""
    """Condition over sidecar columns, e.g. `width >= 256 and punsafe < 0.1`; empty keeps all samples."""
    quarantine: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Digest of the quarantine list (`dataserver lint`) whose samples are left out; empty for none."""


class TokenizerSpec(_Model):
    """The tokenizer of the text."""

    name: Name = "bytes"
    """Logical name; `bytes` is the built-in byte-level vocabulary that needs no file."""
    digest: Digest
    """SHA-256 of the tokenizer's file (for `bytes`: of its name and version)."""
    vocab_size: Positive
    """Number of token ids the backbone must know, special tokens included."""
    bos: TokenId
    """First token of every sample."""
    eos: TokenId
    """Last token of an understood sample; a target of the loss."""
    boi: TokenId
    """Stands before the embeddings, or the query tokens, of an image."""
    eoi: TokenId
    """Stands after the embeddings of an image."""
    image: TokenId
    """Stands where an image embedding replaces the token's own."""
    query: TokenId
    """Stands where a learned query replaces the token's own."""


class Sizing(_Model):
    """How an image becomes a patch grid."""

    patch: Annotated[int, Field(ge=1, le=256)] = 14
    """Side of a square patch in pixels."""
    merge: Annotated[int, Field(ge=1, le=16)] = 2
    """merge x merge patches become one backbone token; grids are multiples of it in both directions."""
    max_patches: Annotated[int, Field(ge=1, le=2**20)] = 1024
    """Upper bound of the patches of one image; larger images are scaled down, aspect kept."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_patches < self.merge**2:
            raise ValueError(
                f"max_patches is {self.max_patches}; at least merge^2 = {self.merge**2} are required for one token"
            )
        return self


class Packing(_Model):
    """Whether several samples share a sequence."""

    enabled: bool = True
    """False: one sample per sequence, and every step holds exactly `global_batch` samples."""
    fill: DecimalString = "0.97"
    """Planned share of `global_batch x seq_len` tokens of a step; ignored without packing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 < Fraction(self.fill) <= 1:
            raise ValueError(f"fill is {self.fill}; a value in (0, 1] is required")
        return self


class Generation(_Model):
    """How often an image-text pair trains the generator instead of being understood."""

    ratio: DecimalString = "0"
    """Probability of the keyed draw, per pair; 0 needs no generator, 1 no encoder."""
    query_tokens: Annotated[int, Field(ge=1, le=65536)] = 64
    """Query tokens after the caption whose last hidden states condition the generator."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if Fraction(self.ratio) > 1:
            raise ValueError(f"ratio is {self.ratio}; a probability in [0, 1] is required")
        return self


class Stream(_Model):
    """The part of a job that decides which samples a step holds, and what they look like."""

    datasets: Annotated[tuple[DatasetSpec, ...], Field(min_length=1, max_length=1024)]
    """The mixture."""
    tokenizer: TokenizerSpec
    """Tokenizer and special token ids."""
    sizing: Sizing = Sizing()
    """Patch grids."""
    seq_len: Annotated[int, Field(ge=8, le=2**22)]
    """Longest sequence in tokens; a longer sample's text is cut, its images never."""
    packing: Packing = Packing()
    """Packing into sequences."""
    global_batch: Annotated[int, Field(ge=1, le=2**20)]
    """Sequences of one step."""
    generation: Generation = Generation()
    """Understanding or generation."""
    shuffle_window: Annotated[int, Field(ge=1, le=4096)] = 8
    """Shards whose samples are mixed with each other; shards themselves are permuted over the whole pass."""
    seed: Natural = 0
    """Key of all randomness of the job."""
    order_version: Positive = 1
    """Version of the rules that turn (stream, step) into samples."""
    content_version: Positive = 1
    """Version of the rules that turn samples into bytes: decoding, resizing, tokenizing, tensor layout."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [d.name for d in self.datasets]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"datasets {twice} are named twice; every entry needs a name of its own")
        if all(Fraction(d.weight) == 0 for d in self.datasets):
            raise ValueError("all dataset weights are 0; at least one must be positive")
        ids = self.tokenizer
        for field in ("bos", "eos", "boi", "eoi", "image", "query"):
            if getattr(ids, field) >= ids.vocab_size:
                raise ValueError(
                    f"tokenizer.{field} is {getattr(ids, field)}; it must lie below vocab_size {ids.vocab_size}"
                )
        if self.generation.query_tokens + 3 > self.seq_len and Fraction(self.generation.ratio) > 0:
            raise ValueError(
                f"{self.generation.query_tokens} query tokens and 3 more do not fit seq_len {self.seq_len}; "
                "raise seq_len or lower generation.query_tokens"
            )
        return self

    def weight_shares(self) -> tuple[Fraction, ...]:
        """Share of each dataset, summing to one."""
        weights = [Fraction(d.weight) for d in self.datasets]
        total = sum(weights)
        return tuple(Fraction(w, total) for w in weights)


class ModuleKind(StrEnum):
    """What a module computes."""

    ENCODER = "encoder"
    BACKBONE = "backbone"
    GENERATOR = "generator"


class Cost(_Model):
    """Time of one microbatch in a whole module: the sum over its items of linear n + quadratic n^2, and a constant.

    An item is an image of n patches (encoder, generator) or a sample of n tokens (backbone).
    """

    microbatch_ns: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Nanoseconds of a forward pass that no item causes."""
    linear_ps: Annotated[int, Field(ge=0, le=10**11)]
    """Picoseconds of a forward pass for each patch or token."""
    quadratic_fs: Annotated[int, Field(ge=0, le=10**8)]
    """Femtoseconds of a forward pass for each pair of patches or tokens of one item (attention)."""
    backward_percent: Annotated[int, Field(ge=0, le=1000)] = 200
    """Backward time in percent of the forward time; 0 for a frozen module that passes no gradient on."""


class ModelCost(_Model):
    """A cost by the names of a model and a device; parsing a job turns it into the integers of `Cost`."""

    model: Name
    """A named model of the module's kind: vit-h; llama3-7b, llama3-13b, llama3-70b; dit-1b; tiny of every kind."""
    device: Name
    """Device that it runs on: a800, h100 or h200. The work of a rank is divided by the module's tp x sp."""
    efficiency: DecimalString
    """Share of the device's dense bf16 peak that is reached."""
    frozen: bool = False
    """Whether its weights are not trained."""
    input_gradient: bool = True
    """Whether a module before a frozen one is trained, so that gradients must pass; before an encoder nothing is."""
    checkpoint: bool = False
    """Whether activations are computed again in the backward pass."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 < Fraction(self.efficiency) <= 1:
            raise ValueError(f"efficiency is {self.efficiency}; a value in (0, 1] is required")
        return self

    def fields_of(self, kind: ModuleKind, degree: int) -> dict[str, int]:
        """The fields of the `Cost` of a module of that kind, whose work `degree` devices share.

        Raises:
            ValueError: an unknown name.
        """
        found = hardware.coefficients(kind, self.model, self.device, Fraction(self.efficiency), degree)
        backward = hardware.backward_percent(
            frozen=self.frozen,
            input_gradient=self.input_gradient and kind is not ModuleKind.ENCODER,
            checkpoint=self.checkpoint,
        )
        return {**asdict(found), "backward_percent": backward}


DEFAULT_COSTS = {
    ModuleKind.ENCODER: ModelCost(model="vit-h", device="h100", efficiency="0.4"),
    ModuleKind.BACKBONE: ModelCost(model="llama3-7b", device="h100", efficiency="0.4"),
    ModuleKind.GENERATOR: ModelCost(model="dit-1b", device="h100", efficiency="0.4"),
}


class ModuleSpec(_Model):
    """One module and the degrees of its parallelism."""

    name: Name
    """Name that clients ask for."""
    kind: ModuleKind
    """What it computes."""
    dp: Annotated[int, Field(ge=1, le=65536)] = 1
    """Data-parallel ranks."""
    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor-parallel degree; peers of one rank get the same view."""
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Pipeline stages; only a backbone has more than one."""
    sp: Annotated[int, Field(ge=1, le=1024)] = 1
    """Sequence-parallel degree; peers of one rank get the same view."""
    cost: Annotated[Cost, Field(default=None, validate_default=True)]
    """Time model, by numbers or by names; the default depends on the kind."""

    @field_validator("cost", mode="before", json_schema_input_type=Cost | ModelCost | None)
    @classmethod
    def _named_cost(cls, value: Any, info: ValidationInfo) -> Any:
        """Names become integers, so that a job's identity holds nothing that another release may reckon anew."""
        if not {"kind", "tp", "sp"} <= info.data.keys():  # one of them is wrong, and reported
            return value
        kind, degree = info.data["kind"], info.data["tp"] * info.data["sp"]
        if value is None:
            return DEFAULT_COSTS[kind].fields_of(kind, degree)
        if isinstance(value, dict) and "model" in value:
            try:
                value = ModelCost.model_validate(value)
            except ValidationError as error:
                problems = [(*e["loc"], e["msg"].removeprefix("Value error, ")) for e in error.errors()]
                raise ValueError("; ".join(": ".join(map(str, p)) for p in problems)) from None
        return value.fields_of(kind, degree) if isinstance(value, ModelCost) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pp > 1 and self.kind is not ModuleKind.BACKBONE:
            raise ValueError(
                f"module {self.name} ({self.kind}) has pp {self.pp}; only a backbone has stages, set pp to 1"
            )
        return self


class BalancePolicy(StrEnum):
    """How items are spread over ranks."""

    LPT = "lpt"
    """Longest processing time first with equal counts (DistTrain, Algorithm 1), in the backbone kept only where the
    simulator finds the step faster than in canonical order."""
    NONE = "none"
    """Canonical order, dealt out in runs: the baseline."""


class OrderPolicy(StrEnum):
    """How a rank's microbatches are ordered."""

    DISTTRAIN = "disttrain"
    """DistTrain, Algorithm 2, kept only where the simulator finds the step faster than in the order before it."""
    SEARCH = "search"
    """Bounded search over assignment, composition and order of all microbatches together, scored by the simulator and
    started from the best of the others."""
    NONE = "none"
    """As they come: the baseline."""


class PackingPolicy(StrEnum):
    """How samples are packed into sequences."""

    BALANCED = "balanced"
    """Into as many sequences as there are slots, of equal backbone cost (linear and quadratic) rather than full."""
    BEST_FIT = "best_fit"
    """Best-fit decreasing: few, full sequences."""
    FIRST_FIT = "first_fit"
    """First-fit decreasing."""


class Policies(_Model):
    """Choices that never change a step's samples."""

    packing: PackingPolicy = PackingPolicy.BALANCED
    """Which sequence holds each sample, where the stream packs at all."""

    balance: BalancePolicy = BalancePolicy.LPT
    """Spread over data-parallel ranks, in every module."""
    order: OrderPolicy = OrderPolicy.SEARCH
    """Order of microbatches within a backbone rank."""


class LastStep(StrEnum):
    """What becomes of a last step that has fewer samples than the others."""

    PAD = "pad"
    """It is served, with empty slots."""
    DROP = "drop"
    """It is left out."""


class End(_Model):
    """When the job ends: exactly one of `steps` and `passes`."""

    steps: Positive | None = None
    """Number of steps."""
    passes: Positive | None = None
    """Passes that every dataset completes; in a mixture the smaller ones begin further passes meanwhile."""
    last: LastStep = LastStep.PAD
    """The last short step of a job that ends with `passes`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.passes is None):
            raise ValueError("exactly one of end.steps and end.passes is required")
        return self


class Execution(_Model):
    """How the job runs; any execution of one stream trains on the same samples in the same steps."""

    modules: Annotated[tuple[ModuleSpec, ...], Field(min_length=1, max_length=64)]
    """The modules; this version plans one backbone, at most one encoder and at most one generator."""
    microbatch: Annotated[int, Field(ge=1, le=65536)] = 1
    """Sequences of one microbatch of one backbone rank."""
    extra_in_flight: Annotated[int, Field(ge=0, le=1024)] = 0
    """Microbatches that each pipeline stage may hold beyond those of 1F1B: less waiting, more activation memory."""
    policies: Policies = Policies()
    """Planning policies."""
    end: End
    """End of the job."""
    plan_version: Positive = 1
    """Version of the rules that turn a step's samples into a plan."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [m.name for m in self.modules]
        if len(set(names)) < len(names):
            raise ValueError(f"module names {names} are not unique; give each module a name of its own")
        kinds = [m.kind for m in self.modules]
        if kinds.count(ModuleKind.BACKBONE) != 1 or any(kinds.count(k) > 1 for k in kinds):
            raise ValueError(
                f"found modules of kinds {[str(k) for k in kinds]}; one backbone, at most one encoder and at most one "
                "generator are required"
            )
        return self

    def module(self, name: str) -> ModuleSpec:
        """The module of that name; ValueError names the ones there are."""
        for module in self.modules:
            if module.name == name:
                return module
        raise ValueError(f"module {name!r} is not in the job; it has {[m.name for m in self.modules]}")

    def of_kind(self, kind: ModuleKind) -> ModuleSpec | None:
        """The module of that kind, if the job has one."""
        return next((m for m in self.modules if m.kind is kind), None)

    @property
    def backbone(self) -> ModuleSpec:
        """The backbone."""
        return next(m for m in self.modules if m.kind is ModuleKind.BACKBONE)


class JobSpec(_Model):
    """A whole job."""

    stream: Stream
    """Which samples each step holds."""
    execution: Execution
    """How they are run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        ratio = Fraction(self.stream.generation.ratio)
        if ratio > 0 and self.execution.of_kind(ModuleKind.GENERATOR) is None:
            raise ValueError(
                f"generation.ratio is {self.stream.generation.ratio} but the job has no module of kind generator; "
                "add one or set the ratio to 0"
            )
        backbone = self.execution.backbone
        slots = backbone.dp * self.execution.microbatch
        if self.stream.global_batch % slots:
            raise ValueError(
                f"global_batch {self.stream.global_batch} does not divide into dp {backbone.dp} x microbatch "
                f"{self.execution.microbatch} = {slots} sequences; use a multiple of {slots}"
            )
        return self
