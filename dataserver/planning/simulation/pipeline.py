"""What a joined pipeline is made of: nodes, the model chunks they hold, who feeds whom, and what everything costs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64
from dataserver.planning.simulation.operations import Operations


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A joined pipeline: n nodes, each one data-parallel rank of one stage, and who feeds whom.

    A block is one model chunk of one node: block b is chunk b % num_chunks of node b // num_chunks. Without virtual
    stages a block is a node.
    """

    num_stages: int
    stage: I64
    """int64 [n]: the stage of each node."""
    forward_ns: I64
    """int64 [blocks, microbatches]: time of each forward."""
    backward_ns: I64
    """int64 [blocks, microbatches]: time of each backward."""
    edges: I64
    """int64 [e, 3]: in this microbatch the target block needs the source's output and gives its gradient back."""
    operations: Sequence[Operations]
    """What each stage does, in order."""
    num_chunks: int = 1
    """Model chunks of each node."""
    transfer_ns: I64 | None = None
    """int64 [e]: from the end of a pass until its output, or gradient, is at the other end of the edge. Pure latency:
    transfers share no link and delay no computation. Without it 0."""
    interaction_ns: I64 | None = None
    """int64 [n, batches]: time of each contrastive batch's interaction on each node that runs one. A batch is
    `microbatches / batches` consecutive microbatches."""
    activation_bytes: I64 | None = None
    """int64 [blocks, microbatches]: held from the start of a forward to the end of its backward, or to the end of the
    forward where no backward is run (frozen modules)."""

    @property
    def num_batches(self) -> int:
        """Contrastive batches; 0 if microbatches do not interact."""
        return 0 if self.interaction_ns is None else self.interaction_ns.shape[1]

    @property
    def delay_ns(self) -> I64:
        """`transfer_ns`, whether there is any or not."""
        return np.zeros(len(self.edges), np.int64) if self.transfer_ns is None else self.transfer_ns

    def check(self) -> None:
        """Refuse arrays that do not fit each other.

        Raises:
            ValueError: which do not.
        """
        blocks, microbatches = len(self.stage) * self.num_chunks, self.forward_ns.shape[1]
        for name, values, shape in (
            ("forward_ns", self.forward_ns, (blocks, microbatches)),
            ("backward_ns", self.backward_ns, (blocks, microbatches)),
            ("edges", self.edges, (len(self.edges), 3)),
            ("transfer_ns", self.transfer_ns, (len(self.edges),)),
            ("interaction_ns", self.interaction_ns, (len(self.stage), self.num_batches)),
            ("activation_bytes", self.activation_bytes, (blocks, microbatches)),
        ):
            if values is not None and values.shape != shape:
                raise ValueError(
                    f"{name} has shape {values.shape}; {len(self.stage)} nodes of {self.num_chunks} chunks and "
                    f"{microbatches} microbatches require {shape}"
                )
            if values is not None and values.size and values.min() < 0:
                raise ValueError(f"{name} holds {int(values.min())}; nothing may be negative")
        if len(self.operations) != self.num_stages:
            raise ValueError(
                f"{len(self.operations)} operation lists for {self.num_stages} stages; give each stage one"
            )
        if self.num_batches and microbatches % self.num_batches:
            raise ValueError(
                f"{microbatches} microbatches do not divide into {self.num_batches} contrastive batches; give every "
                "batch the same number"
            )
        for name, numbers, limit in (
            ("stages", self.stage, self.num_stages),
            ("microbatches of edges", self.edges[:, 0], microbatches),
            ("blocks of edges", self.edges[:, 1:], blocks),
        ):
            if numbers.size and not 0 <= numbers.min() <= numbers.max() < limit:
                raise ValueError(f"{name} lie in [{numbers.min()}, {numbers.max()}]; [0, {limit}) is required")


def chunk_transfers(num_stages: int, num_chunks: int = 1) -> I64:
    """The way of a microbatch through all chunks of a pipeline: stage, chunk, next stage, next chunk. int64 [h, 4]."""
    virtual = np.arange(num_stages * num_chunks)
    place = np.stack([virtual % num_stages, virtual // num_stages], axis=1)
    return np.concatenate([place[:-1], place[1:]], axis=1)


def chain_edges(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> I64:
    """The edges of a chain of one node for each stage, which every microbatch passes once for each chunk. [e, 3]."""
    stage, chunk, next_stage, next_chunk = chunk_transfers(num_stages, num_chunks).T
    transfer = np.stack([stage * num_chunks + chunk, next_stage * num_chunks + next_chunk], axis=1)
    microbatch = np.repeat(np.arange(num_microbatches), len(transfer))
    return np.column_stack([microbatch, np.tile(transfer, (num_microbatches, 1))]).astype(np.int64)
