"""Spreading items over bins so that the heaviest bin is light.

All balancers have the signature of `Balancer`: loads, number of bins, and two optional caps in; the bin of each item
out. `BALANCERS` names them.
"""

from collections.abc import Mapping
from types import MappingProxyType

from dataserver.planning.balancing.assignment import (
    bytes_between_nodes,
    fewest_bytes,
    lower_peaks,
    peak_between_nodes,
    traffic_between,
)
from dataserver.planning.balancing.greedy import in_runs, longest_first, longest_first_of_each
from dataserver.planning.balancing.interface import (
    Balancer,
    BinBudget,
    BinBudgetError,
    bin_loads,
    bin_totals,
    check,
    lower_bound,
    plain,
)
from dataserver.planning.balancing.padded import padded
from dataserver.planning.balancing.search import searched

BALANCERS: Mapping[str, Balancer] = MappingProxyType(
    {
        "lpt": longest_first,
        "search": searched,
        "padded": padded,
    }
)
"""Every balancer by its name; jobs name `lpt`. `padded` is for items that are padded, and for those alone."""

__all__ = [
    "BALANCERS",
    "Balancer",
    "BinBudget",
    "BinBudgetError",
    "bin_loads",
    "bin_totals",
    "bytes_between_nodes",
    "check",
    "fewest_bytes",
    "in_runs",
    "longest_first",
    "longest_first_of_each",
    "lower_bound",
    "lower_peaks",
    "padded",
    "peak_between_nodes",
    "plain",
    "searched",
    "traffic_between",
]
