"""What a module of a job must fulfil to be trained: a pure function of (its view, rows in) -> (rows out, loss).

It sees no transport, no other rank and no other module. Where rows come from and go to, when it runs, how gradients
travel and what is saved is the trainer's part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor, nn

from dataserver.planning.job.fields import ModuleSpec, Stream
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.stream.randomness import dataset_key
from trainclient.exchange.rows import Rows
from trainclient.exchange.view_groups import SequenceViewGroup
from trainclient.models.contrastive import ScoreRows
from trainclient.stream.microbatch import Items


class Target(StrEnum):
    """What a loss is a sum over; the plan knows how many the whole step has, and the loss is divided by that."""

    TEXT = "text"
    """The loss is a sum over target tokens."""
    IMAGE = "image"
    """The loss is a sum over target patches."""
    PAIRS = "pairs"
    """Samples of contrastive batches, in all towers; the loss is made of their features."""


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """What the randomness of a stream, such as diffusion noise, depends on besides the sample."""

    seed: int
    datasets: tuple[int, ...]
    """`dataset_key` of each dataset of the stream."""

    @classmethod
    def of(cls, stream: Stream) -> Self:
        """The key of a stream."""
        return cls(stream.seed, tuple(dataset_key(d.name) for d in stream.datasets))


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a module sees of a microbatch."""

    tensors: Mapping[str, Tensor]
    """Those that it asked for (`TrainedModule.tensors`), on the CPU; protos/disttrain/v1/microbatch.proto says what
    they hold."""
    items: Items
    """The samples or images that they belong to, in their order."""
    key: NoiseKey
    """Noise key of the stream that the items belong to."""
    sequence_group: SequenceViewGroup | None = None
    """Backbone: the ranks that have the same view and share its tokens, if others have; rows of other modules arrive at
    the first of them and leave from it."""
    prepared: Tensor | None = None
    """What the module has made of it before its rows came (`TrainedModule.prepare`), without a graph."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """What a tower makes of the items of a view, with their graph; the loss of a contrastive batch couples them."""

    values: Tensor
    """[items, width], of length 1."""
    scores: type[ScoreRows]
    """What makes a loss of the scores of pairs."""
    scale: Tensor | None = None
    """[2]: temperature and bias of the scores of pairs, from the job's first tower."""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """What a module makes of a view."""

    rows: Rows | None = None
    """Rows for the modules that it feeds; with their graph."""
    loss_sum: Tensor | None = None
    """Scalar, at least float32: the sum (not the mean) of the losses of its targets."""
    features: Features | None = None
    """Features from the last chunk of a tower."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a module is put: what it must know of the job to fit in."""

    job: JobSpec
    module: ModuleSpec
    """Its entry in the job."""
    row_width: int
    """Width of the rows that it gives: of the backbone, and for an encoder of what the backbone takes for images; of a
    tower, of those between its chunks."""
    chunk: int = 0
    """Which of its chunks this is, consecutive shares of its layers; from 0."""
    num_chunks: int = 1
    """Number of chunks that the module is cut into; 1 is the whole module."""
    image_width: int = 0
    """Width of the rows that a backbone's first chunk takes, where they are wider than those that it gives; else 0."""

    @property
    def width_in(self) -> int:
        """Width of the rows that it takes."""
        return self.image_width or self.row_width


class TrainedModule(ABC):
    """A module of a job, or the share of its layers that one process holds.

    Parameters must be named as in the whole module, whatever share of it this is: checkpoints name them so.
    """

    tensors: tuple[str, ...] = ()
    """Names of the tensors that it reads from its view."""
    target: Target | None = None
    """What its loss is a sum over; None if it has no loss."""
    recomputes: bool = False
    """Whether it computes its activations again in backward passes where the job asks for it (`ModuleSpec.recompute`
    of its site)."""

    trains_weights: bool = True
    """Whether the gradients of most of its weights are computed, and not of adapters alone: what a backward costs."""
    passes_gradients: bool = True
    """Whether gradients go back through its blocks; not where all that comes before a projector is frozen."""

    def __init__(self, network: nn.Module) -> None:
        """Hold the network, whose parameters are trained."""
        self.network = network
        self.computes_in: torch.dtype | None = None
        """Type in which it computes, where its parameters are stored in another one."""
        self.gather: Callable[[], None] = lambda: None
        """Has parameters outside of the network's lists be here before `forward`, where they are gathered for it."""

    @property
    def device(self) -> torch.device:
        """Device on which the module computes."""
        return next(self.network.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type in which it computes, and of the rows that it takes and gives."""
        return self.computes_in or next(self.network.parameters()).dtype

    @abstractmethod
    def forward(self, view: View, rows: Rows | None) -> Output:
        """Run it on one microbatch; everything that gradients follow must be in torch.

        Args:
            view: what the data servers sent.
            rows: `values` [num_rows(view), row_width] of the modules that feed it, a leaf whose gradient goes back to
                them; None if no module does.

        Raises:
            ValueError: the view and the rows do not fit each other.
        """

    def prepare(self, view: View) -> Tensor | None:
        """Compute what takes no rows of others, while these are on their way; `forward` gets it as `view.prepared`.

        It has no graph, which belongs to `forward`; and calls `gather` before it takes a parameter, on all ranks alike.
        """
        del view
        return None

    def num_tokens(self, view: View) -> int:
        """Tokens of a view, for metrics; 0 for a module of images."""
        del view
        return 0

    def forward_flops(self, view: View) -> int | None:
        """Floating-point operations of the whole module's forward on a view, for metrics; None if it does not count."""
        del view
        return None

    def num_rows(self, view: View) -> int:
        """Rows that arrive from other modules with a view; a module that none feeds need not say."""
        del view
        return 0
