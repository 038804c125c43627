"""Costs found in measured times, for the next job: what plans a running one needs none of it, so it is apart."""

from dataserver.planning.fitting.fitting import (
    MAX_TIME_NS,
    Fit,
    FitError,
    TimingSamples,
    fit,
    microbatch_sizes,
)

__all__ = ["MAX_TIME_NS", "Fit", "FitError", "TimingSamples", "fit", "microbatch_sizes"]
