"""What towers cost at other degrees than a job gives them, from the job's cost model and its samples.

Tensor parallelism divides work, states and activations evenly here, and its communication costs nothing: a degree above
one is chosen for memory alone. A constant of `Cost.microbatch_ns` stays as it is, so fewer replicas with more samples
each use the devices better.
"""

from dataserver.planning import I64
from dataserver.planning.costs.model import backward_ns, forward_ns
from dataserver.planning.job.fields import Cost, Memory, ModuleSpec
from dataserver.planning.layouts.contrastive.choice import TowerCluster, TowerDegree, TowerProfile


def tower_profile(
    tower: ModuleSpec, sizes: I64, batch: int, microbatches: int, state_bytes: int, cluster: TowerCluster
) -> TowerProfile:
    """A tower without pipeline stages at every degree that divides a node.

    Times are those of the mean sample, activations those of the fullest contrastive batch.

    Args:
        tower: with costs and memory for tp x sp devices.
        sizes: int64 [n]: patches or tokens of samples that stand for all, one contrastive batch after the other.
        batch: samples of a contrastive batch; it divides n.
        microbatches: of each rank for one contrastive batch.
        state_bytes: parameters, gradients and optimizer states of the whole tower.
        cluster: what it runs on.
    """
    shared, count = tower.tp * tower.sp, len(sizes)
    forward = forward_ns(tower.cost, sizes)
    work_ps = 1_000 * int(forward.sum() + backward_ns(tower.cost, forward).sum()) * shared
    fullest = int(sizes.reshape(-1, batch).sum(axis=1).max())
    held = 0 if tower.memory is None else tower.memory.unit_bytes * fullest * shared
    constant = tower.cost.microbatch_ns * (100 + tower.cost.backward_percent) // 100
    return TowerProfile(
        tower.name,
        tuple(
            TowerDegree(
                tp=tp,
                fixed_ns=constant * microbatches,
                sample_ps=-(-work_ps // (count * tp)),
                state_bytes=-(-state_bytes // tp),
                sample_bytes=-(-held // (batch * tp)),
            )
            for tp in range(1, cluster.devices_per_node + 1)
            if cluster.devices_per_node % tp == 0
        ),
    )


def with_degrees(tower: ModuleSpec, tp: int, replicas: int, free_bytes: int) -> ModuleSpec:
    """The same tower, without pipeline stages, at other degrees; costs and memory follow.

    Args:
        tower: with costs and memory for tp x sp devices.
        tp: tensor-parallel degree.
        replicas: data-parallel ranks.
        free_bytes: what states leave of a device; used where the tower states its memory.
    """
    shared, cost, memory = tower.tp * tower.sp, tower.cost, tower.memory
    changed = Cost(
        microbatch_ns=cost.microbatch_ns,
        linear_ps=-(-cost.linear_ps * shared // tp),
        quadratic_fs=-(-cost.quadratic_fs * shared // tp),
        backward_percent=cost.backward_percent,
    )
    if memory is not None:
        memory = Memory(budget_bytes=free_bytes, unit_bytes=-(-memory.unit_bytes * shared // tp))
    degrees = {"dp": replicas, "tp": tp, "pp": 1, "sp": 1}
    return tower.model_copy(update={**degrees, "cost": changed, "memory": memory})
