"""What the executor needs to know of a microbatch, however it came."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataserver.planning.samples import I64
from trainclient.parallel.broker import RoutingError, RowBlocks
from trainclient.parallel.messages import Stamp


class BatchItems(Protocol):
    """Names of the samples or images of a view, parallel arrays."""

    @property
    def dataset(self) -> NDArray[np.integer]:
        """Position of the dataset in the job's list."""

    @property
    def pass_(self) -> NDArray[np.integer]:
        """Pass over that dataset."""

    @property
    def sample(self) -> NDArray[np.unsignedinteger]:
        """Sample within the dataset."""

    @property
    def image(self) -> NDArray[np.integer]:
        """Number of the image within its sample; empty in a backbone view."""

    @property
    def valid(self) -> NDArray[np.bool_]:
        """Whether the item could be made from its bytes."""


class BatchRouting(Protocol):
    """Rows that leave or reach this rank in this wave, parallel arrays."""

    @property
    def source_module(self) -> str:
        """Module that makes the rows."""

    @property
    def target_module(self) -> str:
        """Module that takes them."""

    @property
    def source_rank(self) -> NDArray[np.integer]:
        """Rank that makes them."""

    @property
    def source_start(self) -> NDArray[np.integer]:
        """First row of the output."""

    @property
    def target_rank(self) -> NDArray[np.integer]:
        """Rank that takes them."""

    @property
    def target_start(self) -> NDArray[np.integer]:
        """First row of the input."""

    @property
    def rows(self) -> NDArray[np.integer]:
        """Number of rows."""


class BatchDenominators(Protocol):
    """What the losses of the whole step are divided by."""

    @property
    def text_tokens(self) -> int:
        """Target tokens of the text loss."""

    @property
    def target_patches(self) -> int:
        """Target patches of the generator's loss."""


class ViewBatch(Protocol):
    """One microbatch of one (module, rank)."""

    @property
    def plan_hash(self) -> bytes:
        """SHA-256 of the step's plan."""

    @property
    def step(self) -> int:
        """Step."""

    @property
    def microbatch(self) -> int:
        """Microbatch within the step."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step."""

    @property
    def denominators(self) -> BatchDenominators:
        """Denominators of the step's losses."""

    @property
    def items(self) -> BatchItems:
        """What the view holds."""

    @property
    def routings(self) -> Sequence[BatchRouting]:
        """The ways in and out of this rank."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of the view, on the CPU."""


def stamp_of(batch: ViewBatch) -> Stamp:
    """What the messages of a microbatch are stamped with."""
    return Stamp(batch.plan_hash, batch.step, batch.microbatch)


def outgoing(batch: ViewBatch, source: str, target: str) -> RowBlocks:
    """The blocks that this rank of `source` sends to `target` in the forward pass."""
    r = _routing(batch, source, target)
    return RowBlocks(_i64(r.target_rank), _i64(r.source_start), _i64(r.rows), _i64(r.source_start))


def incoming(batch: ViewBatch, source: str, target: str) -> RowBlocks:
    """The blocks that this rank of `target` receives from `source` in the forward pass."""
    r = _routing(batch, source, target)
    return RowBlocks(_i64(r.source_rank), _i64(r.target_start), _i64(r.rows), _i64(r.source_start))


def _routing(batch: ViewBatch, source: str, target: str) -> BatchRouting:
    for routing in batch.routings:
        if (routing.source_module, routing.target_module) == (source, target):
            return routing
    found = [f"{r.source_module} -> {r.target_module}" for r in batch.routings]
    raise RoutingError(f"the view has no routing {source} -> {target}, only {found}; the server planned another job")


def _i64(values: NDArray[np.integer]) -> I64:
    return values.astype(np.int64)
