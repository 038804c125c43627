"""Backbones in stages whose head is the embedding of tokens: one parameter, which the first and the last stage hold.

Both begin with the same values, since they have one name. They add up their gradients, bit for bit the same sum, and
make the same update of it; the first stage counts and saves it.
"""

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dataserver.planning.job.fields import ModuleSpec
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import Groups
from trainclient.training.models import Models

EMBEDDING = "embed.weight"


class TiedHeads:
    """The tied parameters of one process, and whom it shares them with."""

    def __init__(self, models: Models, topology: Topology, groups: Groups, timeout_s: float) -> None:
        """Make the groups of all processes that share such a parameter; all processes do so together."""
        self._groups: dict[str, ProcessGroup] = {}
        self.copies: set[str] = set()
        """Parameters of this process that the first stage counts and saves."""
        for name, pairs in tied_pairs(models, topology).items():
            for first, last in pairs:
                group = dist.new_group([first, last], timeout=timedelta(seconds=timeout_s))
                if groups.rank in (first, last):
                    self._groups[name] = group
                if groups.rank == last:
                    self.copies.add(name)

    def sum(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up what both stages found for a parameter, in place; all processes that share one do so together."""
        for name, group in self._groups.items():
            if name in gradients:  # not frozen
                dist.all_reduce(gradients[name], group=group)


def tied_pairs(models: Models, topology: Topology) -> dict[str, list[tuple[int, int]]]:
    """Global ranks of the two processes of each tied parameter that both hold, by the parameter's name."""
    tied = (m for m in models.job.execution.modules if getattr(models.sizes.get(m.name), "tied", False))
    return {f"{module.name}.{EMBEDDING}": _ends(topology, module) for module in tied}


def _ends(topology: Topology, module: ModuleSpec) -> list[tuple[int, int]]:
    """Global ranks of the processes with the first and the last chunk of a module, of equal coordinates; none where
    the module is in one piece."""
    found: dict[tuple[int, int, int], dict[str, int]] = {}
    for rank, process in enumerate(topology.processes):
        for chunk in process.chunks:
            if chunk.module.name == module.name and chunk.count > 1 and (chunk.is_first or chunk.is_last):
                ends = found.setdefault((process.rank, process.sp, process.tp), {})
                ends["first" if chunk.is_first else "last"] = rank
    return [(ends["first"], ends["last"]) for ends in found.values()]
