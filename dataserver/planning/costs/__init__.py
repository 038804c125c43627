"""The cost model: times of microbatches, int64 nanoseconds.

`times` applies a cost to sizes, `hardware` knows the costs of named models, `fitting` finds costs in measured times.
"""

from dataserver.planning.costs.times import backward_ns, forward_ns, hop_ns, padded_ns

__all__ = ["backward_ns", "forward_ns", "hop_ns", "padded_ns"]
