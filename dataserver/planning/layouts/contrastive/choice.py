"""Replicas and tensor-parallel degree of each tower (DISTMM, section 4.2: partitioner and data load balancer).

Fewer replicas of a light tower with a bigger batch each use the devices better and end together with the heavy tower.
With tower s on n_s devices at tensor-parallel degree tp_s, each replica gets B tp_s / n_s samples of the batch B.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class TowerDegree:
    """A profiled tensor-parallel degree of a tower: cost of one replica as a function of its batch."""

    tp: int
    fixed_ns: int
    """Forward and backward of a step, whatever the batch: launches, synchronisation of gradients."""
    sample_ps: int
    """Picoseconds more for each sample of the replica's batch."""
    state_bytes: int
    """Bytes on each device of parameters, gradients, optimizer states."""
    sample_bytes: int
    """Bytes on each device for each sample: activations, all held until the interaction is done."""


@dataclass(frozen=True, slots=True)
class TowerProfile:
    """A tower and the degrees that were profiled."""

    name: str
    degrees: tuple[TowerDegree, ...]


@dataclass(frozen=True, slots=True)
class TowerCluster:
    """The devices that the towers divide or share."""

    num_devices: int
    devices_per_node: int
    """Tensor parallelism stays within a node: its degree must divide this."""
    device_bytes: int


class TowerPlacement(StrEnum):
    """How towers use the devices."""

    PARALLEL = "parallel"
    """Each tower has devices of its own; the step takes as long as the slowest."""
    SHARED = "shared"
    """All devices run one tower after the other; the step takes the sum, every device holds all towers."""


@dataclass(frozen=True, slots=True)
class TowerChoice:
    """Replicas, degree and samples that one tower gets."""

    name: str
    tp: int
    replicas: int
    batch: int
    """Samples of a contrastive batch that one replica takes."""
    step_ns: int
    device_bytes: int
    """Memory on each of its devices."""

    @property
    def devices(self) -> int:
        """Devices that the tower runs on."""
        return self.tp * self.replicas


@dataclass(frozen=True, slots=True)
class TowerPlan:
    """The choice for all towers."""

    placement: TowerPlacement
    towers: tuple[TowerChoice, ...]
    step_ns: int


def choose_towers(
    towers: Sequence[TowerProfile], cluster: TowerCluster, batch: int, microbatches: int = 1
) -> TowerPlan:
    """The fastest plan, whether the towers divide the devices or share them; on a tie they divide them.

    Args:
        towers: what was profiled.
        cluster: what they run on.
        batch: samples of a contrastive batch.
        microbatches: of each replica; they are equal.

    Raises:
        ValueError: neither fits.
    """
    plans, reasons = [], []
    for place in (devices_in_parallel, share_time):
        try:
            plans.append(place(towers, cluster, batch, microbatches))
        except ValueError as error:
            reasons.append(str(error))
    if not plans:
        raise ValueError("; ".join(dict.fromkeys(reasons)))
    return min(plans, key=lambda plan: plan.step_ns)


def devices_in_parallel(
    towers: Sequence[TowerProfile], cluster: TowerCluster, batch: int, microbatches: int = 1
) -> TowerPlan:
    """min max_s T_s(n_s, tp_s, B tp_s / n_s) with sum_s n_s <= N: the optimum over all choices.

    For each time that a tower can take, from the shortest: every tower takes the fewest devices that are as fast.

    Raises:
        ValueError: a tower does not fit a device, or the towers need more devices than there are.
    """
    if cluster.num_devices < len(towers):
        raise _too_few([1] * len(towers), towers, cluster, batch)
    options = [
        sorted(_options(t, cluster, batch, microbatches), key=lambda o: (o.devices, o.step_ns, o.tp)) for t in towers
    ]
    for limit in sorted({option.step_ns for tower in options for option in tower}):
        chosen = [next((o for o in tower if o.step_ns <= limit), None) for tower in options]
        found = tuple(option for option in chosen if option is not None)
        if len(found) == len(towers) and sum(option.devices for option in found) <= cluster.num_devices:
            return TowerPlan(TowerPlacement.PARALLEL, found, limit)
    raise _too_few([tower[0].devices for tower in options], towers, cluster, batch)


def _too_few(fewest: Sequence[int], towers: Sequence[TowerProfile], cluster: TowerCluster, batch: int) -> ValueError:
    return ValueError(
        f"towers {[t.name for t in towers]} need at least {fewest} devices of their own for a batch of {batch}, "
        f"{cluster.num_devices} are there; use more devices or let the towers share them"
    )


def devices_shared_equally(
    towers: Sequence[TowerProfile], cluster: TowerCluster, batch: int, microbatches: int = 1
) -> TowerPlan:
    """The fastest plan in which all towers have the same degree and as many replicas: what is done without this choice.

    Raises:
        ValueError: a tower does not fit a device, or the towers need more devices than there are.
    """
    options = [{(o.tp, o.replicas): o for o in _options(tower, cluster, batch, microbatches)} for tower in towers]
    found = [
        tuple(tower[degrees] for tower in options)
        for degrees in sorted(set.intersection(*(set(tower) for tower in options)))
        if degrees[0] * degrees[1] * len(towers) <= cluster.num_devices
    ]
    if not found:
        raise ValueError(
            f"towers {[t.name for t in towers]} find no degrees that all can have, on {cluster.num_devices} devices of "
            f"their own for a batch of {batch}"
        )
    best = min(found, key=lambda choices: max(choice.step_ns for choice in choices))
    return TowerPlan(TowerPlacement.PARALLEL, best, max(choice.step_ns for choice in best))


def share_time(towers: Sequence[TowerProfile], cluster: TowerCluster, batch: int, microbatches: int = 1) -> TowerPlan:
    """min sum_s T_s(n_s, tp_s, B tp_s / n_s) with every n_s <= N and all towers in each device's memory.

    Tower by tower, of partial choices those are kept that no other beats in both memory and time: the optimum.

    Raises:
        ValueError: the towers do not fit a device together.
    """
    partial: list[tuple[int, int, tuple[TowerChoice, ...]]] = [(0, 0, ())]
    for tower in towers:
        options = sorted(
            _options(tower, cluster, batch, microbatches), key=lambda o: (o.device_bytes, o.step_ns, o.devices, o.tp)
        )
        longer = [(b + o.device_bytes, t + o.step_ns, (*c, o)) for b, t, c in partial for o in options]
        longer = [entry for entry in sorted(longer, key=lambda e: e[:2]) if entry[0] <= cluster.device_bytes]
        partial = []
        for entry in longer:
            if not partial or entry[1] < partial[-1][1]:
                partial.append(entry)
        if not partial:
            raise ValueError(
                f"towers {[t.name for t in towers]} together need more than {cluster.device_bytes} bytes of a device "
                f"from {tower.name} on; lower the batch of {batch} or use more devices"
            )
    _, time, chosen = partial[-1]
    return TowerPlan(TowerPlacement.SHARED, chosen, time)


def _options(tower: TowerProfile, cluster: TowerCluster, batch: int, microbatches: int) -> list[TowerChoice]:
    """Every choice of degree and replicas that fits: equal batches, degrees within a node, memory kept."""
    degrees = [d for d in tower.degrees if d.tp >= 1 and cluster.devices_per_node % d.tp == 0]
    found = [
        TowerChoice(
            name=tower.name,
            tp=d.tp,
            replicas=replicas,
            batch=batch // replicas,
            step_ns=d.fixed_ns + batch // replicas * d.sample_ps // 1_000,
            device_bytes=d.state_bytes + batch // replicas * d.sample_bytes,
        )
        for d in degrees
        for replicas in range(1, min(cluster.num_devices // d.tp, batch) + 1)
        if batch % (replicas * microbatches) == 0
    ]
    fitting = [option for option in found if option.device_bytes <= cluster.device_bytes]
    if not fitting:
        least = min((option.device_bytes for option in found), default=0)
        raise ValueError(
            f"tower {tower.name} fits no device: {len(degrees)} of degrees {[d.tp for d in tower.degrees]} "
            f"divide a node of {cluster.devices_per_node}; a batch of {batch} on {cluster.num_devices} devices takes "
            f"at least {least} bytes of the {cluster.device_bytes} that each has: use more devices or such with more "
            "memory, or a smaller contrastive batch"
        )
    return fitting
