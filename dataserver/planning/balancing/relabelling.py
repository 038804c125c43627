"""Which rank takes which of the balanced batches, so that few bytes cross between nodes."""

import numpy as np

from dataserver.planning.balancing.interface import MAX_TOTAL, plain
from dataserver.planning.samples import I64


def traffic_between(source: I64, batch: I64, size: I64, num_sources: int, num_batches: int) -> I64:
    """Bytes that each batch takes from each source rank.

    Args:
        source: int64 [n], the rank where each item is.
        batch: int64 [n], the batch it goes to.
        size: int64 [n], its bytes.
        num_sources: source ranks.
        num_batches: batches.

    Returns:
        int64 [num_sources, num_batches].
    """
    traffic = np.zeros((num_sources, num_batches), np.int64)
    np.add.at(traffic, (source, batch), size)
    return traffic


def bytes_between_nodes(traffic: I64, source_node: I64, node: I64, rank: I64) -> int:
    """Bytes that leave their node if batch k goes to rank[k].

    Args:
        traffic: int64 [s, d], bytes that batch k takes from source rank i.
        source_node: int64 [s], the node of each source rank.
        node: int64 [d], the node of each rank.
        rank: int64 [d], the rank of each batch.
    """
    return int(traffic[source_node[:, None] != node[rank][None, :]].sum())


def relabel(traffic: I64, source_node: I64, node: I64) -> I64:
    """Names for the batches with the fewest bytes between nodes (OrchMLLM, node-wise all-to-all, total bytes).

    The batches of a phase are balanced whatever their names are, so loads are unchanged. An optimal assignment of
    batches to nodes, each of which takes as many as it has ranks; never more bytes than under the identity. A batch
    that stays on its own node keeps its rank, the others take the ranks left in order. O(d^2 nodes).

    Args:
        traffic: int64 [s, d], bytes that batch k takes from source rank i, sum at most MAX_TOTAL.
        source_node: int64 [s], the node of each source rank.
        node: int64 [d], the node of each rank that takes a batch.

    Returns:
        int64 [d]: the rank of each batch, a permutation.

    Raises:
        ValueError: shapes disagree, or traffic is negative or too large.
    """
    from dataserver.planning.kernels import assignment

    traffic = plain(traffic)
    if traffic.shape != (len(source_node), len(node)):
        raise ValueError(f"traffic is {traffic.shape}; {len(source_node)} sources and {len(node)} ranks are given")
    if traffic.size and (traffic.min() < 0 or int(traffic.max()) > MAX_TOTAL // traffic.size):
        raise ValueError(
            f"traffic from {int(traffic.min())} to {int(traffic.max())} bytes; {traffic.size} entries must lie in "
            f"[0, 2^61 / {traffic.size}]"
        )
    nodes, home = np.unique(node, return_inverse=True)
    kept = np.zeros((len(node), len(nodes)), np.int64)
    for number, name in enumerate(nodes.tolist()):
        kept[:, number] = traffic[source_node == name].sum(axis=0)
    capacity = np.bincount(home, minlength=len(nodes)).astype(np.int64)
    chosen = assignment.assign(-kept, capacity)
    rank = np.full(len(node), -1, np.int64)
    stays = chosen == home
    rank[stays] = np.flatnonzero(stays)
    for number in range(len(nodes)):
        free = np.setdiff1d(np.flatnonzero(home == number), rank)
        rank[(chosen == number) & ~stays] = free
    return rank
