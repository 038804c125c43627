"""DISTMM's layout: towers on devices of their own, by the chooser that `dataserver towers` uses."""

from typing import Final

from dataserver.planning.layouts.contrastive.choice import (
    TowerCluster,
    TowerDegree,
    TowerPlan,
    TowerProfile,
    devices_in_parallel,
    devices_shared_equally,
)
from trainclient.orchestrate.choice import Choice, ModuleChoice, Problem, TooLargeError
from trainclient.orchestrate.costs import Option

FEATURES: Final = 1024
"""Numbers of a feature."""


def contrastive(problem: Problem) -> list[Choice]:
    """The best replicas and degrees of each tower.

    Raises:
        TooLargeError: nothing fits.
    """
    return _choices(problem, "contrastive")


def equal_towers(problem: Problem) -> list[Choice]:
    """The best where all towers have the same degrees: the baseline.

    Raises:
        TooLargeError: nothing fits.
    """
    return _choices(problem, "monolithic")


def _choices(problem: Problem, layout: str) -> list[Choice]:
    cluster, stream = problem.cluster, problem.workload.stream
    batch = stream.contrastive_batch or stream.global_batch
    devices = TowerCluster(cluster.gpus, cluster.gpus_per_node, cluster.memory_bytes)
    best: Choice | None = None
    for recompute in (False, True):
        options = {(n.name, o.tp): o for n in problem.networks for o in problem.options(n)
                   if o.recompute is (recompute and n.gradient_passes > 0)}  # fmt: skip
        profiles = [_profile(problem, [o for o in options.values() if o.network is n]) for n in problem.networks]
        assign = devices_in_parallel if layout == "contrastive" else devices_shared_equally
        try:
            plan = assign(profiles, devices, batch)
        except ValueError:
            continue
        made = _choice(problem, layout, plan, options, batch)
        if best is None or made.step_ns < best.step_ns:
            best = made
    if best is None:
        raise TooLargeError(layout)
    return [best]


def _profile(problem: Problem, options: list[Option]) -> TowerProfile:
    degrees = tuple(
        TowerDegree(
            tp=o.tp,
            fixed_ns=round(o.fixed_ns + o.sync_ns(2, 1, problem.cluster)),
            sample_ps=round(1000 * o.sequence_ns),
            state_bytes=round(o.static_bytes(1) + o.optimizer_bytes(1)),
            sample_bytes=round(o.sequence_bytes + o.load.rows * o.work_bytes),
        )
        for o in options
    )
    return TowerProfile(options[0].network.name, degrees)


def _choice(
    problem: Problem,
    layout: str,
    plan: TowerPlan,
    options: dict[tuple[str, int], Option],
    batch: int,
) -> Choice:
    count = problem.workload.stream.global_batch // batch
    modules = []
    for found in plan.towers:
        option = options[found.name, found.tp]
        states = option.static_bytes(1) + option.optimizer_bytes(1)
        work = found.batch * option.load.rows * option.work_bytes
        wave = option.fixed_ns + found.batch * option.sequence_ns
        modules.append(ModuleChoice(option, found.replicas, 1, found.device_bytes, states, work, wave))
    gpus = sum(m.gpus for m in modules)
    interaction = _interaction_ns(problem, batch, gpus)
    forwards = [m.wave_ns * 100 / (100 + m.option.cost.backward_percent) for m in modules]
    slowest = max(forwards) + max(m.wave_ns - f for m, f in zip(modules, forwards, strict=True))
    parts = {
        "waves": count * slowest,  # all towers meet between forwards and backwards
        "interactions": count * interaction,
        "gradients": max(m.option.sync_ns(m.dp, 1, problem.cluster) for m in modules),
    }
    return Choice(
        layout, tuple(modules), gpus, 1, count, sum(parts.values()), parts, "none",
        extras={"interaction_ns": round(interaction)},
    )  # fmt: skip


def _interaction_ns(problem: Problem, batch: int, gpus: int) -> float:
    """Features of all samples to all devices, and each device's share of the products, forward and backward."""
    cluster = problem.cluster
    sent = 2 * 2 * FEATURES * batch * len(problem.networks) / cluster.bandwidth(gpus)
    return sent + 6 * batch * batch * FEATURES / (gpus * cluster.peak_flops_ns * 0.3)
