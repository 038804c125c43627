"""The part of a job that belongs to the grouped layout."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dataserver.planning.job.fields import (
    BalancePolicy,
    ExecutionParts,
    Extreme,
    ModelSize,
    ModuleKind,
    ModuleSpec,
    Natural,
    Schedule,
    SpecModel,
    Stream,
    WaveOptions,
)
from dataserver.planning.layouts.grouped.compositions import check_compositions


class GroupPolicy(StrEnum):
    """How sequence-parallel groups are chosen."""

    SEARCH = "search"
    """Groups of unequal degrees for each microbatch, by this planner's bounded search."""
    HOMOGENEOUS = "homogeneous"
    """The best single degree of each step (FlexSP-BatchAda)."""
    STATIC = "static"
    """The largest degree always: the baseline."""


class Exchange(SpecModel):
    """What the all-to-alls of one sequence-parallel degree cost."""

    degree: Annotated[int, Field(ge=2, le=65536)]
    """Ranks of the group, a power of two."""
    unit_ps: Natural
    """Picoseconds for each token of a rank, forward and backward together. If there is no backward, half of this."""


class GroupedOptions(WaveOptions):
    """Backbone ranks that share sequences, in groups chosen for each microbatch (FlexSP, arXiv 2412.01523).

    The backbone's `dp` counts all its devices, and its `memory` says how many tokens each of them holds. Encoders and
    generators have their own devices.
    """

    kind: Literal["grouped"]
    """Selects the grouped layout."""
    policy: GroupPolicy = GroupPolicy.SEARCH
    """How each microbatch's groups of ranks are chosen."""
    min_degree: Annotated[int, Field(ge=1, le=65536)] = 1
    """Ranks of the smallest group, a power of two. A job with more than 50,000 ways to group its ranks is refused and
    needs a larger value: 128 ranks can have groups of 1 to 128, but 256 ranks only groups of 1 to 8, not of 1 to 16."""
    max_degree: Annotated[int, Field(ge=1, le=65536)]
    """Ranks of the largest group, a power of two that divides the backbone's `dp`, and its heads."""
    heads: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Number of key and value heads of the backbone, which are divided evenly among the ranks of a group; without
    shared heads it is the number of query heads. By default that of the model that the backbone's cost names. If the
    job states neither, servers accept it, and a trainer refuses it if its model cannot be divided."""
    exchange: tuple[Exchange, ...] = ()
    """One entry for each power of two from `min_degree` (but at least 2) to `max_degree`."""

    @property
    def group_degrees(self) -> tuple[int, ...]:
        """Degrees of groups, ascending: all powers of two between the smallest and the largest."""
        return tuple(1 << p for p in range(self.min_degree.bit_length() - 1, self.max_degree.bit_length()))

    @model_validator(mode="after")
    def _check_degrees(self) -> Self:
        for name, degree in (("min_degree", self.min_degree), ("max_degree", self.max_degree)):
            if degree & (degree - 1):
                raise ValueError(f"{name} is {degree}; a power of two is required")
        if self.min_degree > self.max_degree:
            raise ValueError(f"min_degree is {self.min_degree}, above max_degree {self.max_degree}; lower it")
        degrees = [e.degree for e in self.exchange]
        wanted = [degree for degree in self.group_degrees if degree > 1]
        if sorted(degrees) != wanted:
            raise ValueError(
                f"exchange has degrees {degrees}; one entry for each of {wanted} is required: what the all-to-alls "
                "of groups of so many ranks cost"
            )
        if self.heads is not None:
            self._check_heads(self.heads, "layout.heads is", "")
        return self

    def _check_heads(self, heads: int, whose: str, otherwise: str) -> None:
        """Refuse groups whose ranks cannot have equal parts of so many heads."""
        if heads % self.max_degree:
            raise ValueError(
                f"{whose} {heads}, and groups have up to {self.max_degree} ranks, which cannot have equal parts of so "
                f"many heads; lower layout.max_degree to {heads & -heads}{otherwise}"
            )

    @model_validator(mode="after")
    def _check_grouped_schedule(self) -> Self:
        if self.schedule is Schedule.INTERLEAVED:
            raise ValueError(
                "schedule is interleaved; a grouped backbone has one stage of one chunk: use 1f1b or gpipe"
            )
        return self

    def num_microbatches(self, stream: Stream, execution: ExecutionParts) -> int:  # noqa: ARG002
        """Number of microbatches that memory asks for."""
        return 1

    def step_size(self, stream: Stream, execution: ExecutionParts) -> dict[str, int]:
        """Every sequence is compared with all others of its microbatch."""
        return {**super().step_size(stream, execution), "group_sequences": stream.global_batch}

    def extremes(self, stream: Stream, execution: ExecutionParts) -> Iterable[Extreme]:
        """Times of a batch are multiplied by the devices, and kept below 2^50."""
        backbone = execution.backbone
        cost, tokens, sequences = backbone.cost, stream.seq_len, 2 * stream.global_batch
        token_ps = cost.linear_ps * (100 + cost.backward_percent) // 100 + max(
            (e.unit_ps for e in self.exchange), default=0
        )
        square_fs = cost.quadratic_fs * (100 + cost.backward_percent) // 100
        single = tokens * token_ps // 1000 + tokens**2 * square_fs // 10**6
        fixed = cost.microbatch_ns * (100 + cost.backward_percent) // 100
        remedy = "lower the costs of the backbone or of the exchange, or stream.seq_len"
        yield Extreme(
            "nanoseconds of all groups x ranks", 4 * (single + fixed) * sequences * max(1024, backbone.dp), remedy
        )
        yield Extreme("picoseconds of exchanges", 2 * sequences * tokens * token_ps, remedy)
        yield Extreme("femtoseconds of attention", 2 * tokens**2 * square_fs, remedy)

    def check_modules(self, execution: ExecutionParts) -> None:
        """Refuse a backbone whose ranks cannot form the groups."""
        super().check_modules(execution)
        backbone = execution.backbone
        if execution.microbatch != 1:
            raise ValueError(
                f"microbatch is {execution.microbatch}; groups decide microbatches themselves: leave microbatch out"
            )
        if backbone.balance is not BalancePolicy.LPT:
            raise ValueError(
                f"module {backbone.name} has balance {backbone.balance}; groups themselves spread the sequences: leave "
                "balance out"
            )
        if backbone.memory is None or (backbone.pp, backbone.sp) != (1, 1) or backbone.padded:
            raise ValueError(
                f"module {backbone.name} has pp {backbone.pp}, sp {backbone.sp}, padded {backbone.padded} and "
                f"{'no ' if backbone.memory is None else ''}memory; groups need pp 1, sp 1, no padding, and memory, "
                "which says how many tokens a device holds"
            )
        if backbone.tp != 1:
            raise ValueError(
                f"module {backbone.name} has tp {backbone.tp}; devices of a group divide heads themselves, and dp "
                f"counts all of them: set tp to 1 and dp to {backbone.dp * backbone.tp}"
            )
        if backbone.dp % self.max_degree:
            raise ValueError(
                f"module {backbone.name} has dp {backbone.dp} and groups up to {self.max_degree} ranks; the largest "
                f"group must divide the ranks: change dp, or lower max_degree to {backbone.dp & -backbone.dp}"
            )
        check_compositions(backbone.dp, self.min_degree, self.max_degree)

    def check_model(self, module: ModuleSpec, name: str, size: ModelSize) -> None:
        """Refuse a backbone whose heads the ranks of a group cannot divide, unless the job itself says how many."""
        if module.kind is ModuleKind.BACKBONE and self.heads is None:
            otherwise = ", or give layout.heads if the model is another one"
            self._check_heads(
                size.groups,
                f"the cost of module {module.name} names {name}, whose heads of keys and values are",
                otherwise,
            )

    def check_batch(self, stream: Stream, backbone: ModuleSpec, microbatch: int) -> None:
        """Accept every batch, since groups can divide any."""
