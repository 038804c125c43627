"""Communication brokers: rows from one module's ranks to another's, along the plan's routing maps.

This is DistTrain's communication broker (arXiv 2408.04275) without processes of its own: both modules
know the routing of every wave from their views, so each rank sends each other rank at most one message per wave and
direction, and ranks that share no rows exchange nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dataserver.planning.samples import I64
from trainclient.parallel.messages import Kind, Stamp, decode, encode, make_header
from trainclient.parallel.transport import Channel


class RoutingError(ValueError):
    """Routing entries that do not fit the rows of a view."""


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """One side of the routing of a wave: which blocks of this rank's rows each rank of the other module has.

    All arrays are int64 [r]: one entry for each image.
    """

    peer: I64
    """Data-parallel rank within the other module."""
    start: I64
    """First row on this side."""
    rows: I64
    order: I64
    """Sort key that both sides share: the first row on the sending side of the forward pass."""

    def check(self, num_rows: int, num_peers: int, what: str) -> None:
        """Raise RoutingError unless the blocks cover `num_rows` rows exactly once and name existing peers."""
        by_start = np.argsort(self.start, kind="stable")
        ends = np.cumsum(self.rows[by_start])
        expected = np.concatenate([np.zeros(1, np.int64), ends])
        covered = int(ends[-1]) if len(ends) else 0
        if covered != num_rows or not np.array_equal(expected[:-1], self.start[by_start]) or (self.rows < 1).any():
            raise RoutingError(
                f"the routing covers {covered} rows of {what} where the view has {num_rows}, or covers some twice; "
                "the server's plan and view do not belong together"
            )
        if len(self.peer) and not 0 <= int(self.peer.min()) <= int(self.peer.max()) < num_peers:
            raise RoutingError(
                f"the routing of {what} names rank {int(self.peer.max())} of a module with {num_peers} ranks; all "
                "ranks must be started with the job that the servers plan"
            )

    def items(self, offsets: I64, what: str) -> Tensor:
        """The item of each block, int64 [r], given the first row of each item and the end.

        Raises:
            RoutingError: a block is not exactly one item.
        """
        found = np.searchsorted(offsets[:-1], self.start)
        inside = found < len(offsets) - 1
        if not inside.all() or (offsets[found] != self.start).any() or (np.diff(offsets)[found] != self.rows).any():
            raise RoutingError(
                f"the routing cuts {what} within an image; the server's plan and view do not belong together"
            )
        return torch.from_numpy(found)


class Link:
    """This rank's end of the transfers between two neighbouring stages."""

    def __init__(self, channel: Channel, peers: Sequence[int], dtype: torch.dtype) -> None:
        """Make a link.

        Args:
            channel: carries one direction.
            peers: global ranks at the other end, indexed by their data-parallel rank.
            dtype: of the rows.
        """
        self.channel = channel
        self.peers = tuple(peers)
        self.dtype = dtype

    def send(self, kind: Kind, stamp: Stamp, peer: int, valid: Tensor, rows: Tensor) -> None:
        """Send valid bits bool [v] and rows [r, width] to a peer; nothing at all where there are no rows."""
        if not len(rows):
            return
        to = self.peers[peer]
        row_bytes = rows.numel() * rows.element_size()
        header = make_header(kind, stamp, len(valid), row_bytes, self.channel.rank, to)
        self.channel.send(to, encode(header, valid, rows), stamp.microbatch)

    def receive(
        self, kind: Kind, stamp: Stamp, peer: int, num_valid: int, num_rows: int, width: int
    ) -> tuple[Tensor, Tensor]:
        """Receive what the peer's `send` sent: bool [num_valid] on the CPU and rows [num_rows, width].

        Raises:
            BrokerMismatchError: the message belongs elsewhere.
            PeerLostError: the peer is gone.
        """
        if not num_rows:
            empty = torch.empty(0, width, dtype=self.dtype, device=self.channel.device)
            return torch.ones(num_valid, dtype=torch.bool), empty
        source = self.peers[peer]
        row_bytes = num_rows * width * self.dtype.itemsize
        header = make_header(kind, stamp, num_valid, row_bytes, source, self.channel.rank)
        return decode(self.channel.receive(source, header.message_bytes), header, width, self.dtype)


def send_blocks(link: Link, kind: Kind, stamp: Stamp, blocks: RowBlocks, rows: Tensor, valid: Tensor) -> None:
    """Send each peer its blocks of `rows` [n, width], with the valid bit (bool [r], CPU) of each block."""
    for peer, entries in _by_peer(blocks):
        index = _row_index(blocks, entries).to(rows.device, non_blocking=True)
        link.send(kind, stamp, peer, valid[torch.from_numpy(entries)], rows.index_select(0, index))


def receive_blocks(
    link: Link, kind: Kind, stamp: Stamp, blocks: RowBlocks, num_rows: int, width: int
) -> tuple[Tensor, Tensor]:
    """Receive every peer's blocks into their places.

    Returns:
        rows [num_rows, width], and the valid bit of each block, bool [r] on the CPU.
    """
    received = torch.empty(num_rows, width, dtype=link.dtype, device=link.channel.device)
    valid = torch.ones(len(blocks.peer), dtype=torch.bool)
    for peer, entries in _by_peer(blocks):
        index = _row_index(blocks, entries)
        bits, rows = link.receive(kind, stamp, peer, len(entries), len(index), width)
        received.index_copy_(0, index.to(received.device, non_blocking=True), rows)
        valid[torch.from_numpy(entries)] = bits
    return received, valid


def _by_peer(blocks: RowBlocks) -> list[tuple[int, I64]]:
    """For each peer in order the entries that concern it, in the order that both sides share."""
    order = np.lexsort((blocks.order, blocks.peer))
    peers, firsts = np.unique(blocks.peer[order], return_index=True)
    return list(zip(peers.tolist(), np.split(order, firsts[1:]), strict=False))


def _row_index(blocks: RowBlocks, entries: I64) -> Tensor:
    """The rows of the given entries one after the other, int64."""
    lengths = blocks.rows[entries]
    first_of_entry = np.cumsum(lengths) - lengths
    offsets = blocks.start[entries] - first_of_entry
    return torch.from_numpy(np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(offsets, lengths))
