"""What a model lacks to fit any layout, and what would do."""

from typing import Final

from trainclient.orchestrate.choice import NoLayoutError, Problem
from trainclient.orchestrate.costs import Option

RANKS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Data-parallel ranks over which states of the optimizer are divided, of those that are looked at."""


def too_large(problem: Problem, layout: str) -> NoLayoutError:
    """Why no degrees of a layout fit: the module that lacks most, how much that is, and what would be enough."""
    cluster, batch = problem.cluster, problem.workload.stream.global_batch
    needs = {n.name: _least_gpus(problem, problem.options(n)) for n in problem.networks}
    for network in problem.networks:
        gpus, least = needs[network.name]
        if gpus is None:
            return NoLayoutError(
                f"{layout}: module {network.name} ({network.parameters / 1e9:.1f}B parameters) takes at least "
                f"{least / 1e9:.1f} GB on each of its devices, however many there are, and {cluster.gpu} has "
                f"{cluster.memory_bytes / 1e9:.1f}: {(least - cluster.memory_bytes) / 1e9:.1f} GB too little. Use GPUs "
                "with more memory, lower seq-len or the patches of images, or freeze the module"
            )
    total = sum(gpus or 0 for gpus, _ in needs.values())
    shown = ", ".join(f"{name} {gpus}" for name, (gpus, _) in needs.items())
    if total > cluster.gpus:
        return NoLayoutError(
            f"{layout}: the modules need {total} GPUs of {cluster.memory_bytes / 1e9:.0f} GB at least ({shown}), "
            f"{cluster.gpus} are there: {total - cluster.gpus} too few. Use {cluster.whole(total)} or more, GPUs with "
            "more memory, or freeze a module"
        )
    return NoLayoutError(
        f"{layout}: no degrees fit {cluster.gpus} GPUs of {cluster.memory_bytes / 1e9:.0f} GB with a global batch of "
        f"{batch}, though each module alone would ({shown} GPUs at least); use more GPUs, or a batch with more divisors"
    )


def _least_gpus(problem: Problem, options: list[Option]) -> tuple[int | None, float]:
    """The fewest devices that hold a module and an item of it; else None, and what a device would have to hold."""
    memory, best, least = problem.cluster.memory_bytes, None, float("inf")
    for option in options:
        network = option.network
        stages = [n for n in range(1, network.size.layers + 1) if network.size.layers % n == 0]
        for pp in stages if network.role.spine else [1]:
            rows = problem.workload.stream.seq_len if network.role.spine else option.load.largest
            item = rows * (option.unit_bytes / pp + option.work_bytes)
            for dp in RANKS:
                need = option.static_bytes(pp) + option.optimizer_bytes(pp) / dp + item
                least = min(least, need)
                if need <= memory and (best is None or option.tp * pp * dp < best):
                    best = option.tp * pp * dp
    return best, least
