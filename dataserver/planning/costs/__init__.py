"""The cost model: times of microbatches, int64 nanoseconds.

`times` applies a cost to sizes, `hardware` knows the costs of named models, `fitting` finds costs in measured times.
"""

from dataserver.planning.costs.fitting import MAX_TIME_NS, Fit, FitError, Measurements, fit, microbatch_sizes
from dataserver.planning.costs.times import backward_ns, forward_ns, hop_ns

__all__ = [
    "MAX_TIME_NS",
    "Fit",
    "FitError",
    "Measurements",
    "backward_ns",
    "fit",
    "forward_ns",
    "hop_ns",
    "microbatch_sizes",
]
