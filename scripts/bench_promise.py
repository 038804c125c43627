#!/usr/bin/env python
"""Does a step take as long as simulated, and is what the planner chose faster? Measured with processes that sleep.

Real data servers, and one process for each place of a job with the trainer's interpreter, exchange and messages; only
the models sleep what the planner expects of them, so that more processes than cores can be timed. Shapes of pipelines
run in three orders each: random (as the shuffled stream comes), DistTrain's Algorithm 2, and the default plan;
colocated modules as the stream comes, with images dealt out evenly, and as planned; contrastive towers as the stream
comes, and spread over ranks, with one contrastive batch after the other and with DISTMM-Pipe; sequence-parallel groups
of the largest degree as the stream comes, the same balanced and in order, and of unequal degrees. Printed is the
measured time of a step over the simulated one, the median of some steps, what that is for each operation of a process
(an encoder's, backbone's or generator's pass of one microbatch), what the last order gains over the one before it, and
the orders of merit.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.rows import Row, report
from demo_parts.job import job_spec
from demo_parts.processes import FailedError, Processes, python
from demo_parts.stages import BIN
from slept_steps import slept_steps

from dataserver.cli.jobs import DataFlags, open_job
from dataserver.planning.planner import explain
from trainclient.topology.process_grid import Topology

Data = dict[str, Any]
WITHIN = 0.03
"""How far a measured step may be from the simulated one."""
GAIN_WITHIN = 0.05
"""How far what a plan gains may be from what was simulated."""
MEASURED_MS = 8000
"""Steps in random order sleep about so long, in every layout.

A process sleeps for its operations one by one, so that its own work comes on top of each on the step's longest path:
Python, messages and waking up take 1 to 3 ms with more processes than cores, and some 7 where four ranks meet at both
ends of a pass. A device computes meanwhile. Of colocated modules 96 operations follow one another, which makes that 3
to 4 % of a step of 4 s and says nothing of what was simulated; so operations sleep 65 ms at least on average.
"""
ORDERS: Mapping[str, Mapping[str, Any]] = {
    "random": {"layout": {"order": "none"}, "balance": {"encoder": "even", "backbone": "none", "generator": "even"}},
    "algorithm_2": {"layout": {"order": "disttrain"}, "balance": {}},
    "planned": {"layout": {"order": "search"}, "balance": {}},
}
OF_PHASES: Mapping[str, Mapping[str, Any]] = {
    "random": {"layout": {}, "balance": {"encoder": "none", "backbone": "none", "generator": "none"}},
    "images_evenly": {"layout": {}, "balance": {"encoder": "even", "backbone": "none", "generator": "even"}},
    "planned": {"layout": {}, "balance": {}},
}
"""Phases that run alone have no order: what differs is who has what."""
OF_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "random": {"layout": {"schedule": "batch_sync"}, "balance": {"image": "none", "text": "none"}},
    "batch_sync": {"layout": {"schedule": "batch_sync"}, "balance": {}},
    "distmm_pipe": {"layout": {}, "balance": {}},
}
OF_GROUPS: Mapping[str, Mapping[str, Any]] = {
    "random": {
        "layout": {"policy": "static", "order": "none"},
        "balance": {"encoder": "even", "generator": "even"},
    },
    "static": {"layout": {"policy": "static"}, "balance": {}},
    "planned": {"layout": {}, "balance": {}},
}
"""The longest samples need the largest group, which is all that a static degree has."""
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "encoder 1, backbone 2 x 2, generator 1": {"encoder": {}, "backbone": {"dp": 2, "pp": 2}, "generator": {}},
    "encoder 2, backbone 1 x 3": {"encoder": {"dp": 2}, "backbone": {"dp": 1, "pp": 3}},
    "encoder 1, backbone 2 x 2 in 2 chunks, generator 2": {
        "encoder": {},
        "backbone": {"dp": 2, "pp": 2},
        "generator": {"dp": 2},
        "layout": {"schedule": "interleaved", "chunks": 2},
    },
    "colocated 2": {
        "encoder": {"dp": 2},
        "backbone": {"dp": 2, "pp": 1},
        "generator": {"dp": 2},
        "layout": {"kind": "colocated"},
        "orders": OF_PHASES,
    },
    "contrastive image 2, text 2 x 2": {
        "image": {"dp": 2},
        "text": {"dp": 2, "pp": 2},
        "layout": {"kind": "contrastive"},
        "orders": OF_TOWERS,
    },
    "grouped, backbone 4 with encoder 1 and generator 1": {
        "encoder": {},
        "backbone": {"dp": 4, "memory": {"budget_bytes": 140_000, "unit_bytes": 1_000}},
        "generator": {},
        "layout": {
            "kind": "grouped",
            "max_degree": 4,
            "exchange": [{"degree": 2, "unit_ps": 3_000_000}, {"degree": 4, "unit_ps": 9_000_000}],
        },
        "orders": OF_GROUPS,
    },
}
"""Degrees of the modules; costs and data are those of the demo."""


def job(shape: Mapping[str, Any], order: Mapping[str, Any], steps: int) -> Data:
    """The demo's job with other degrees, in an order."""
    given = shape.get("layout", {})
    spec = job_spec(steps, given.get("kind", "pipelined"))
    modules = [m | shape[m["name"]] for m in spec["execution"]["modules"] if m["name"] in shape]
    for module in modules:
        if module["name"] in order["balance"]:
            module["balance"] = order["balance"][module["name"]]
    layout = {**spec["execution"]["layout"], **order["layout"], **given}
    spec["execution"] |= {"modules": modules, "layout": layout}
    if "generator" not in shape:
        spec["stream"].pop("generation", None)
    return spec


def simulate(file: Path, located: tuple[str, str], steps: int) -> tuple[list[float], float]:
    """Simulated milliseconds of each step of a job, and operations of a process in it; the file is filled in."""
    planner = open_job(file, DataFlags((located[0],), (located[1],)))
    file.write_text(planner.job.text)
    found = [explain(planner.job, planner.plan(step)).after for step in range(steps)]
    operations = statistics.fmean(2 * after.pipeline.forward_ns.size for after in found)
    processes = Topology.of(planner.job.spec).world_size
    return [after.makespan_ns / 1e6 for after in found], operations / processes


def time_shape(
    name: str, folder: Path, located: tuple[str, str], servers: str, processes: Processes, steps: int
) -> Iterator[Row]:
    """Rows of one shape: each order, and their order of merit."""
    orders: Mapping[str, Mapping[str, Any]] = SHAPES[name].get("orders", ORDERS)
    files = {order: folder / f"{order}.json" for order in orders}
    for order, file in files.items():
        file.write_text(json.dumps(job(SHAPES[name], orders[order], steps)))
    found = {order: simulate(file, located, steps) for order, file in files.items()}
    simulated = {order: times for order, (times, _) in found.items()}
    scale = max(1, ceil(MEASURED_MS / statistics.fmean(simulated["random"])))
    measured = slept_steps(
        processes,
        list(files.values()),
        servers=servers,
        steps=steps,
        scale=scale,
        output=folder / "measured.json",
        say=lambda line: print(f"  {line}", file=sys.stderr),
    )
    ratios = {
        order: statistics.median(
            s * 1e3 / (ms * scale) for s, ms in zip(measured[order], simulated[order], strict=True)
        )
        for order in orders
    }
    for order, ratio in ratios.items():
        mean, operations = statistics.fmean(simulated[order]), found[order][1]
        over = (ratio - 1) * mean * scale / operations
        shown = (
            f"{ratio:.3f} x simulated ({mean:.1f} ms, {scale} x slower), {over:+.1f} ms x {operations:.0f} operations"
        )
        yield Row(f"{name}: {order}", shown, f"within {WITHIN:.0%}", abs(ratio - 1) <= WITHIN)
    *_, before, planned = orders
    gains = [statistics.fmean(times[planned]) / statistics.fmean(times[before]) for times in (measured, simulated)]
    shown, target = (f"{gains[0]:.3f} x", f"{gains[1]:.3f} x simulated, within {GAIN_WITHIN:.0%}")
    yield Row(f"{name}: {planned} over {before}", shown, target, abs(gains[0] / gains[1] - 1) <= GAIN_WITHIN)
    merit = [sorted(orders, key=lambda o: statistics.fmean(times[o])) for times in (simulated, measured)]
    yield Row(f"{name}: fastest first", " < ".join(merit[1]), " < ".join(merit[0]), merit[0] == merit[1])


def rows(folder: Path, steps: int, shapes: Sequence[str]) -> Iterator[Row]:
    """Make shards, start a server, and measure the shapes."""
    logs = folder / "logs"
    logs.mkdir()
    located = (f"demo={folder / 'shards'}", f"demo={folder / 'index'}")
    with Processes(logs) as processes:
        flags = ["--index-dir", folder / "index", "--tokenizer", "bytes"]
        for name, command in {
            "shards": python("make_demo_shards.py", folder / "shards"),
            "index": [BIN / "dataserver", "index", folder / "shards", *flags],
        }.items():
            processes.run([processes.start(name, command)], lambda _: None)
        serve = ["serve", "--dataset", located[0], "--index-dir", located[1], "--listen", "127.0.0.1:0"]
        servers = processes.address(processes.start("server", [BIN / "dataserver", *serve]))
        for number, name in enumerate(shapes):
            print(name, file=sys.stderr)
            (folder / str(number)).mkdir()
            yield from time_shape(name, folder / str(number), located, servers, processes, steps)


def main() -> int:
    """Run all jobs, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of each job (default 5)")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES), help="some of the shapes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return report(rows(Path(folder), arguments.steps, arguments.shapes))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (FailedError, ValueError, OSError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
