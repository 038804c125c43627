"""Other ways to run a colocated job."""

from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.colocated.options import ColocatedOptions
from dataserver.planning.layouts.shared.alternatives import (
    Alternatives,
    Dimension,
    balance_of,
    balances,
    edit_layout,
    packings,
)


def alternatives(job: Job) -> Alternatives:
    """Packing and balance together; each balance, and ranks as if all shared a node, by themselves.

    With transfers a node more or less would be another network, on which no time can be compared.
    """
    execution = job.spec.execution
    single, ranks = [balance_of(m) for m in execution.modules], execution.backbone.dp
    if execution.options(ColocatedOptions).ranks_per_node < ranks and execution.transfers is None:
        single.append(Dimension("assignment to ranks", {"as balanced": edit_layout(ranks_per_node=ranks)}))
    return Alternatives([*packings(job), balances(execution)], single)
