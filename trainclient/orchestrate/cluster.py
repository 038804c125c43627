"""What layouts are chosen for: devices, their memory, and what lies between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.planning import I64
from dataserver.planning.job.fields import PEAK_GIGAFLOPS


class ClusterError(ValueError):
    """A cluster that cannot be."""


@dataclass(frozen=True, slots=True)
class Board:
    """What a kind of GPU has, for each one and each direction."""

    memory_gb: float
    within_gb_s: float
    """Bandwidth of a GPU to the others of its node."""
    between_gb_s: float
    """Its share of the node's network."""


BOARDS: Final[Mapping[str, Board]] = MappingProxyType(
    {
        "a800": Board(80, 200, 12.5),
        "h100": Board(80, 450, 50),
        "h200": Board(141, 450, 50),
    }
)
"""NVLink from NVIDIA's data sheets (half of what both directions have). Networks are assumptions: 4 x 200 Gb/s for the
8 GPUs of an A800 node as in DistTrain's cluster, and one port of 400 Gb/s for each H100 and H200."""
MAX_GPUS: Final = 65536
MAX_GIGABYTES: Final = 1_000_000
USABLE: Final = 0.9
"""Share of a GPU's memory that modules may use unless it is said: the rest is CUDA's, buffers of messages, and gaps."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of a job."""

    gpu: str
    gpus: int
    gpus_per_node: int
    memory_bytes: int
    """Bytes of each GPU that modules may use."""
    within_bytes_ns: float
    """Bytes a nanosecond (GB/s) that a GPU sends to others of its node."""
    between_bytes_ns: float
    """The same to other nodes."""
    peak_flops_ns: float
    """Dense bf16 operations of a GPU in a nanosecond."""

    def bandwidth(self, devices: int) -> float:
        """Bytes a nanosecond that each of so many consecutive devices exchanges with the others."""
        return self.within_bytes_ns if devices <= self.gpus_per_node else self.between_bytes_ns

    def bandwidths(self, devices: I64) -> NDArray[np.float64]:
        """`bandwidth` of each of some numbers of devices."""
        return np.where(devices <= self.gpus_per_node, self.within_bytes_ns, self.between_bytes_ns)

    def larger(self) -> Sequence[int]:
        """Numbers of GPUs that larger clusters of the kind have: any within a node, beyond it whole nodes."""
        node = self.gpus_per_node
        return [*range(self.gpus + 1, node + 1), *range(max(self.gpus // node, 1) * node + node, MAX_GPUS + 1, node)]


def cluster(
    gpu: str,
    gpus: int,
    gpus_per_node: int = 8,
    memory_gb: float | None = None,
    within_gb_s: float | None = None,
    between_gb_s: float | None = None,
) -> Cluster:
    """A cluster of a known kind of GPU; what is not given is that of the kind.

    Raises:
        ClusterError: an unknown kind, or numbers that no cluster has.
    """
    if gpu not in BOARDS:
        raise ClusterError(f"there is no GPU kind named {gpu!r}; choose one of {', '.join(sorted(BOARDS))}")
    board = BOARDS[gpu]
    if not 1 <= gpus <= MAX_GPUS or gpus_per_node < 1:
        raise ClusterError(
            f"the cluster has {gpus} GPUs, {gpus_per_node} in each node; 1 to {MAX_GPUS} GPUs, and at least 1 in each "
            "node, are required"
        )
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ClusterError(
            f"{gpus} GPUs are no whole number of nodes of {gpus_per_node}; use {gpus // gpus_per_node * gpus_per_node} "
            f"of them, or set gpus-per-node to a divisor of {gpus}"
        )
    numbers = {
        "memory-gb": USABLE * board.memory_gb if memory_gb is None else memory_gb,
        "within-gb-s": board.within_gb_s if within_gb_s is None else within_gb_s,
        "between-gb-s": board.between_gb_s if between_gb_s is None else between_gb_s,
    }
    for name, value in numbers.items():
        if not 0.001 <= value <= MAX_GIGABYTES:
            raise ClusterError(f"{name} is {value}; a number from 0.001 to {MAX_GIGABYTES:,} is required")
    memory, within, between = numbers.values()
    return Cluster(gpu, gpus, gpus_per_node, int(memory * 1e9), within, between, PEAK_GIGAFLOPS[gpu])
