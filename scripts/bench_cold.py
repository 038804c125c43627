"""Prints what a new machine waits for: the first plan of each layout, and the first word of each command.

Every process begins with an empty cache of compiled kernels. A plan's row is the CPU time of a whole process and its
children, imports included. Times are scaled to the reference machine (`benchmarks.calibration`), by the loops before
and behind each process; the least of a few runs counts, since other programs only add to it. The exit code is 1 if a
row misses its target. Takes about five minutes.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeVar

from benchmarks.calibration import slowdown
from benchmarks.rows import Row, report

ROOT = Path(__file__).resolve().parent.parent
RUNS: Final = 3

THREE = [{"name": kind, "kind": kind, "dp": 2} for kind in ("encoder", "backbone", "generator")]
PIPELINED = [module | ({"pp": 2} if module["kind"] == "backbone" else {}) for module in THREE]
ALONE = [{"name": "backbone", "kind": "backbone", "dp": 2, "memory": {"budget_bytes": 512, "unit_bytes": 1}}]
TOWERS = [{"name": name, "kind": "tower", "modality": name, "dp": 2, "pp": 2} for name in ("image", "text")]
GROUPS = {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 1}]}
Fields = dict[str, Any]
JOBS: Final[dict[str, tuple[float, list[Fields], Fields, Fields]]] = {
    "pipelined": (15, PIPELINED, {"kind": "pipelined"}, {}),
    "grouped": (15, ALONE, GROUPS, {"packing": {"enabled": False}}),
    "colocated": (15, THREE, {"kind": "colocated", "ranks_per_node": 1}, {}),
    "contrastive": (15, TOWERS, {"kind": "contrastive"}, {"contrastive_batch": 8, "packing": {"enabled": False}}),
}
"""Jobs by layout: target in CPU seconds, modules, layout, and fields of the stream."""

SIZES: Final = (1, 4)
"""Times the size of each job: as it is, and in its held-out variant."""

COMMANDS: Final = {
    "index": ["index", "/nothing-here"],
    "lint": ["lint", "/nothing-here"],
    "convert": ["convert", "/nothing-here", "/nothing-there"],
    "describe": ["describe", "/nothing-here"],
    "plan": ["plan", "--job", "/nothing-here"],
    "simulate": ["simulate", "--job", "/nothing-here"],
    "fit": ["fit", "--job", "/nothing-here"],
    "towers": ["towers", "--job", "/nothing-here"],
    "sizes": ["sizes", "/nothing-here", "--output", "/nothing-here"],
    "serve": ["serve", "--dataset", "d=/nothing-here"],
    "top": ["top", "127.0.0.1:1"],
    "bench": ["bench", "/nothing-here"],
    "warm": ["warm"],
    "train": ["train", "--job", "/nothing-here"],
    "export": ["export", "--checkpoint", "/nothing-here"],
    "orchestrate": ["orchestrate"],
    "profile": ["profile"],
    "memory": ["memory"],
}
"""Commands of both programs; each fails at once."""
TRAINCLIENT: Final = ("train", "export", "orchestrate", "profile", "memory")
FIRST_WORD_S: Final = 1.0

T = TypeVar("T")


def main() -> int:
    """Measure all first plans and commands, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # What this program runs itself, in a process of its own: one plan.
    parser.add_argument("--plan", nargs=2, metavar=("LAYOUT", "SIZE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plan:
        plan(given.plan[0], int(given.plan[1]))
        return 0
    return report([*plan_rows(), *word_rows()])


def plan_rows() -> Iterator[Row]:
    """The cold first plan of each layout."""
    for (layout, (target_s, *_)), size in product(JOBS.items(), SIZES):
        cpu_s = min(cold(planned_cpu_s, (layout, size)) for _ in range(RUNS))
        name = f"first plan, {layout}, {size} x the samples and ranks"
        yield Row(name, f"{cpu_s:.1f} CPU-s", f"<= {target_s} CPU-s", cpu_s <= target_s)


def word_rows() -> Iterator[Row]:
    """The first line of each command."""
    for name, arguments in COMMANDS.items():
        word_s = min(cold(first_word_s, arguments) for _ in range(RUNS))
        yield Row(f"first word of `{name}`", f"{word_s:.2f} s", f"<= {FIRST_WORD_S} s", word_s <= FIRST_WORD_S)


def cold(measure: Callable[[T], float], what: T) -> float:
    """The seconds that are measured with an empty cache, on the reference machine."""
    before = slowdown()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = folder
        found = measure(what)
    return found / fmean((before, slowdown()))


def planned_cpu_s(job: tuple[str, int]) -> float:
    """CPU time of a process that plans one step."""
    layout, size = job
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, __file__, "--plan", layout, str(size)], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_word_s(arguments: list[str]) -> float:
    """Time until a command has written a line."""
    program = "trainclient" if arguments[0] in TRAINCLIENT else "dataserver"
    line = [sys.executable, "-m", program, *arguments]
    started = time.perf_counter()
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
        assert process.stderr is not None
        process.stderr.readline()
        passed = time.perf_counter() - started
        process.kill()
    return passed


def plan(layout: str, size: int) -> None:
    """Plan one small step of a made-up job, with so many times its samples and data-parallel ranks."""
    import numpy as np

    from dataserver.planning.job.fields import SPECIAL_TOKENS
    from dataserver.planning.job.identity import parse_job
    from dataserver.planning.planner import plan_step
    from dataserver.planning.stream.sizing import shard_table, size_samples

    _, modules, options, fields = JOBS[layout]
    ids = dict.fromkeys(SPECIAL_TOKENS, 0)
    generation = {"generation": {"ratio": "0.5", "query_tokens": 16}} if len(modules) == len(THREE) else {}
    job = parse_job(
        {
            "stream": {
                "datasets": [{"name": "made-up", "fingerprint": "0" * 64}],
                "tokenizer": {"name": "none", "digest": "0" * 64, "vocab_size": 1, **ids},
                "seq_len": 512,
                "global_batch": 16 * size,
                "seed": size,
                **generation,
                **fields,
            },
            "execution": {
                "modules": [{**module, "dp": module["dp"] * size} for module in modules],
                "layout": options,
                "end": {"steps": 1},
            },
        }
    )
    row = np.arange((48 if generation else 16) * size, dtype=np.int64)
    images = row[:0] if modules is ALONE else row
    side = (28 * (1 + images % 5)).astype(np.int32)
    offsets = np.minimum(np.arange(len(row) + 1, dtype=np.int64), len(images))
    table = shard_table(job.stream, row, 8 + row, offsets, side, side)
    plan_step(job, 0, size_samples(job.stream, 0, 0, row.astype(np.uint64), table))


if __name__ == "__main__":
    sys.exit(main())
