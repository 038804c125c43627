"""Plans the largest step of `large.py` and prints CPU seconds (scaled), and MB before and at most, for its process."""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.calibration import timed

from dataserver.planning.planner import plan_step
from planning_rows.large import LARGEST


def _most_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    job = LARGEST.job()
    samples, before = LARGEST.samples(job, 0), _most_mb()
    print(timed(plan_step, job, 0, samples)[1] / 1_000, before, _most_mb())
