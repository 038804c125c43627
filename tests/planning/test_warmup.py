"""What a server loads before the first job comes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import logging
logging.basicConfig(level=logging.INFO)
from dataserver.planning.warmup import warm_up
warm_up()
logging.info("warm")
from dataserver.planning import kernels
assert not kernels.not_compiled(), kernels.not_compiled()
from builders.pipelined import sample_plan
print(sample_plan().hash.hex())
from dataserver.planning.planner import plan_step
from builders.colocated import MODULES, STREAM, colocated_job, samples_of
from builders.grouped import published_job
from builders.samples import texts
job = colocated_job(MODULES, **STREAM)
print(plan_step(job, 0, samples_of(job, (30, 10), 0, 3)).num_microbatches)
import numpy as np
print(plan_step(published_job(), 0, texts(np.arange(100, 60_100, 1_000))).num_microbatches)
"""


def plan_and_say(cache: Path) -> tuple[list[str], str]:
    """Warm up and plan in another process: what was compiled for the former, and what is said in planning."""
    tests = Path(__file__).resolve().parents[1]
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(cache),
        "PYTHONPATH": f"{tests}:{tests.parent}:{tests.parent / 'scripts'}",
    }
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=110, check=True
    )
    before, _, after = result.stderr.partition("warm")
    return re.findall("compiling (.*) for the cache", before), after


@pytest.mark.long
def test_after_the_warm_up_nothing_is_compiled(tmp_path: Path) -> None:
    compiled, after = plan_and_say(tmp_path)
    assert len(compiled) == len(set(compiled)) > 0, "a kernel was compiled for several kinds of arrays"
    assert "compiling" not in after
