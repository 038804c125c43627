"""Time and memory of a module at each tensor-parallel degree, from its operations and bytes, or as measured.

Times are those of a `Cost`, which is what a job says of a module and what planner and simulator compute with: so what
is solved is what is planned. They contain the sums of tensor parallelism, which are not overlapped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from pydantic import ValidationError

from dataserver.planning.costs.profile import with_sums
from dataserver.planning.job.fields import Cost, fixed_ns
from trainclient.orchestrate.cluster import Cluster
from trainclient.orchestrate.memory import BFLOAT16, Parameters, block_bytes, gathered_at_once, logit_bytes, saved_bytes
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.workload import Load

DEGREES: Final = (1, 2, 4, 8)
"""Tensor-parallel degrees (DistTrain, section 4)."""
EFFICIENCY: Final = 0.76
"""Share of the peak that products of very wide matrices reach: FlexSP's constants (arXiv 2412.01523, measured on A100)
are 0.68 to 0.80 at widths of 4,096 to 6,656."""
HALF_WIDTH: Final = 256
"""Columns of a device's share at which products reach half of that. An assumption; prefer `trainclient profile`."""
ATTENTION: Final = 0.65
"""Share of a module's efficiency that attention reaches: 0.53 to 0.72 by the same constants."""

CostTable = Mapping[tuple[str, int], Cost]
"""Measured costs, by module and degree, without what is computed again."""


@dataclass(frozen=True, slots=True)
class Option:
    """A module at one tensor-parallel degree, with or without computing activations again."""

    network: Network
    load: Load
    tp: int
    recompute: bool
    cost: Cost
    """Cost of a whole module on `tp` devices."""
    fixed_ns: float
    """Forward and backward of a microbatch, whatever it holds."""
    sequence_ns: float
    """Forward and backward of what a sequence holds."""
    unit_bytes: int
    """A patch or token of a microbatch in flight, on each of the `tp` devices of a module in one stage."""
    work_bytes: float
    """What computing a row takes besides: a block's activations that are computed again."""

    @property
    def sequence_bytes(self) -> float:
        """What a sequence in flight holds in a module of one stage."""
        return self.load.rows * self.unit_bytes

    def static_bytes(self, stages: int) -> float:
        """Weights, gradients and logits on each device of the largest of so many stages."""
        return self.parameters(stages).static_bytes() + logit_bytes(self.network.size.vocab_size)

    def optimizer_bytes(self, stages: int) -> float:
        """The optimizer's states of the largest stage, to be divided between data-parallel ranks."""
        return self.parameters(stages).optimizer_bytes()

    def parameters(self, stages: int) -> Parameters:
        """Count parameters on each device of the largest of so many stages: the first has the embedding, the last the
        head."""
        return self.blocks(stages) + self.ends(2 if stages == 1 else 1)

    def blocks(self, stages: int = 1) -> Parameters:
        """Parameters of blocks on each device of one of so many stages."""
        return self._counted(self.network.block_parameters / stages / self.tp)

    def ends(self, count: int = 1) -> Parameters:
        """Those of so many ends, which each tensor-parallel rank has whole."""
        return self._counted(self.network.end_parameters * count)

    def _counted(self, number: float) -> Parameters:
        return Parameters(frozen=number) if self.network.frozen else Parameters(trained=number)

    def sync_ns(self, ranks: int, stages: int, cluster: Cluster) -> float:
        """The sum of gradients over data-parallel ranks and the gathering of weights, once a step.

        Counted as a ring of many ranks has it, in which each sends all bytes once each way.
        """
        if ranks == 1 or self.network.frozen:
            return 0
        return self.parameters(stages).static_bytes() / cluster.bandwidth(ranks * self.tp)


def shard_bytes(option: Option, ranks: int, whole: bool) -> float:
    """States on each device of a module of one stage whose ranks share them (FSDP2).

    With `whole`, weights and gradients are whole and the optimizer's states are shared (zero2); else all are (zero3),
    and two blocks, and an end of a backbone, are gathered at a time.
    """
    own, logits = option.parameters(1), logit_bytes(option.network.size.vocab_size)
    if whole:
        return own.state_bytes(ranks) + logits
    gathered = gathered_at_once(option.blocks(), option.network.size.layers, option.ends())
    return own.dealt_bytes(ranks, gathered) + logits


def gathering_ns(option: Option, ranks: int, cluster: Cluster) -> float:
    """Weights gathered for the forward and the backward of a microbatch, and gradients summed into shares (zero3)."""
    if ranks == 1:
        return 0.0
    network = option.network
    each = BFLOAT16.weight * (2 if network.gradient_passes else 1) + (0 if network.frozen else BFLOAT16.gradient)
    number = network.block_parameters / option.tp + 2 * network.end_parameters
    return each * number / cluster.bandwidth(ranks * option.tp)


def options(
    network: Network, load: Load, cluster: Cluster, max_tp: int = 8, table: CostTable | None = None
) -> list[Option]:
    """A module at every degree that divides its layers and stays within a node.

    Raises:
        ValueError: a table of measured costs that has none of the module.
    """
    found = []
    for tp in DEGREES:
        if not network.divides(tp) or cluster.gpus_per_node % tp or tp > min(cluster.gpus, max_tp):
            continue
        if table is None:
            plain = analytic_cost(network, tp, cluster)
        elif (network.name, tp) in table:
            plain = table[network.name, tp]
        else:
            continue
        again = (False, True) if network.gradient_passes else (False,)
        found += [_option(network, load, tp, recompute, plain) for recompute in again]
    if not found:
        known = sorted(tp for name, tp in table or () if name == network.name)
        raise ValueError(
            f"module {network.name} has no degree of tensor parallelism to choose from: {network.divided}; "
            f"{cluster.gpus_per_node} GPUs per node"
            + (f", and a profile of degrees {known}: profile it, with --tp 1" if table is not None else "")
        )
    return found


def analytic_cost(network: Network, tp: int, cluster: Cluster) -> Cost:
    """The cost of a module at a degree, from operations and bytes."""
    return with_reductions(network, tp, cluster, computed_cost(network, tp, cluster.peak_flops_ns, cluster.gpu))


def computed_cost(network: Network, tp: int, peak_flops_ns: float, gpu: str) -> Cost:
    """What computing a device's share takes, without tensor-parallel sums.

    Raises:
        ValueError: the module is larger than jobs can say.
    """
    share = EFFICIENCY * (network.size.width / tp) / (network.size.width / tp + HALF_WIDTH)
    rate = peak_flops_ns * share * tp
    try:
        return Cost(
            microbatch_ns=fixed_ns(network.kind, network.size, gpu, tp),
            linear_ps=round(1_000 * (network.row_flops + network.windowed_flops / ATTENTION) / rate),
            quadratic_fs=round(1_000_000 * network.pair_flops / (rate * ATTENTION)),
            window=network.window,
            backward_percent=100 * network.gradient_passes,
        )
    except ValidationError:
        raise ValueError(
            f"module {network.name} has {network.parameters / 1e9:,.0f}B parameters in {network.size.layers} layers of "
            f"width {network.size.width}; its times are beyond what a job can say: check its sizes"
        ) from None


def with_reductions(network: Network, tp: int, cluster: Cluster, computed: Cost) -> Cost:
    """A cost with tensor-parallel sums, within a node; errors as in `with_sums`."""
    return with_sums(computed, network.kind, network.size, tp, Fraction(cluster.within_bytes_ns))


def _option(network: Network, load: Load, tp: int, recompute: bool, plain: Cost) -> Option:
    percent = plain.backward_percent + (100 if recompute else 0)
    cost = plain.model_copy(update={"backward_percent": percent})
    both = (100 + percent) / 100
    work = load.rows * cost.linear_ps / 1e3 + load.squares * cost.quadratic_fs / 1e6
    block = block_bytes(network.role.block, network.size, tp)
    held = saved_bytes(network.role.block, network.size, tp, recompute)
    if not network.gradient_passes:
        held = block  # of the block that is computed
    return Option(
        network, load, tp, recompute, cost, both * cost.microbatch_ns, both * work, max(1, round(held)),
        block if recompute else 0,
    )  # fmt: skip
