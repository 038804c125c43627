"""Where the items of a round go: spread over ranks and microbatches, module by module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64, yield_point
from dataserver.planning.balancing import traffic_between
from dataserver.planning.job.fields import BalancePolicy, ModuleKind
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.colocated.assignment import Assignment, Exchange, as_numbered, assign_batches
from dataserver.planning.layouts.colocated.budgets import check_ranks
from dataserver.planning.layouts.colocated.items import ModuleItems
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.layouts.colocated.spreading import Spread, spread_beside, spread_items


@dataclass(frozen=True, slots=True)
class ArrangedRound:
    """What was found for the items of a round, which may be the whole step."""

    spreads: Mapping[str, Spread]
    """How the items of each module are spread."""
    at_home: Mapping[str, I64]
    """int64 [ranks] for each module with an arrangement of its own: nanoseconds if every item stayed on the rank of its
    sequence."""
    exchanges: Sequence[Exchange]
    """Exchanges between the backbone and each of the other modules."""
    assigned: Assignment
    """The rank of each batch of every module; images beside their sequences go where the backbone's batches go."""

    def places(self, module: str) -> tuple[I64, I64]:
        """Rank and microbatch of each item of a module. int64 [k] each."""
        return self.assigned[module][self.spreads[module].batch], self.spreads[module].microbatch


def arrange(execution: Execution, items: Sequence[ModuleItems], microbatches: int) -> ArrangedRound:
    """Spread the items of every module, each for itself, and assign the batches to ranks.

    Raises:
        StepBudgetError: the memory of a module does not hold them at once.
        BinBudgetError: it does not hold them in so many microbatches.
    """
    ranks, name = execution.backbone.dp, execution.backbone.name
    by_name = {i.module.name: i for i in items}
    own = [n for n, i in by_name.items() if n == name or i.module.balance is not BalancePolicy.NONE]
    spreads, at_home = {}, {}
    for module in own:
        spreads[module], at_home[module] = spread_items(by_name[module], len(by_name[name].index), microbatches)
    exchanges = [_exchange(execution, by_name[m], spreads[m], spreads[name]) for m in own if m != name]
    assigned = assign_batches(as_numbered(own, ranks), exchanges)
    for module in [m for m in by_name if m not in own]:
        spreads[module] = spread_beside(by_name[module], spreads[name], microbatches)
        assigned[module] = assigned[name]
        check_ranks(by_name[module], assigned[module][spreads[module].batch], spreads[module].microbatch, microbatches)
    return ArrangedRound(spreads, at_home, exchanges, assigned)


def _exchange(execution: Execution, items: ModuleItems, spread: Spread, backbone: Spread) -> Exchange:
    """What the batches of an encoder hand to those of the backbone, or these to those of a generator."""
    layout, ranks, module = execution.options(ColocatedOptions), execution.backbone.dp, items.module
    ends = [(module.name, spread.batch), (execution.backbone.name, backbone.batch[items.sequence])]
    (source, first), (target, then) = ends if module.kind is ModuleKind.ENCODER else reversed(ends)
    yield_point()
    traffic = traffic_between(first, then, items.rows * layout.row_bytes, ranks, ranks)
    return Exchange(source, target, traffic, np.arange(ranks) // layout.ranks_per_node)
