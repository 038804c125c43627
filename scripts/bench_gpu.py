#!/usr/bin/env python
"""Trains the largest backbone that fits this machine's GPUs, with a ViT-Huge before it, on images from data servers.

All GPUs run both modules by turns (colocated layout), in bfloat16, with blocks compiled. Told are the model FLOPs
utilisation (45 % is wanted from 1B parameters on) and the share of a step in which a process waited for data (less than
1 %); and what webdataset's loader, inside the trainer's process, would make a trainer wait that takes as long for as
many images. Measures are medians over the steps after the warm-up. A record goes to docs/internal/benchmarks/.

Without a GPU nothing is measured: it says what it would run, and exits with 2. --small runs all of it on a CPU, with
tiny modules and without targets, to try the benchmark itself.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from benchmarks.rows import Row, report
from demo_parts.processes import Processes
from on_gpu.preset import SIZES, SMALL, Size, fitting, flags, job, memory_of_encoder
from on_gpu.rivals import rival_waits
from on_gpu.serving import make_shards, servers

RECORDS = Path(__file__).parents[1] / "docs" / "internal" / "benchmarks"
NOTHING_MEASURED = 2
MFU_PERCENT, WAIT_PERCENT = 45.0, 1.0
LEAST_JUDGED = 10**9
"""Parameters from which on the utilisation is judged."""


def train(folder: Path, size: Size, devices: int, steps: int, shards: Path, *, small: bool) -> list[dict[str, Any]]:
    """The metrics of all steps."""
    described, metrics = folder / "job.yaml", folder / "metrics.jsonl"
    kept = None if small else memory_of_encoder(size, torch.cuda.mem_get_info(0)[1], devices)
    described.write_text(yaml.safe_dump(job(size, devices, steps, kept)))
    with servers(folder, shards) as address, Processes(folder) as processes:
        options = flags(size, described, address, metrics, small=small)
        command = [sys.executable, "-m", "trainclient", "train", *options]
        processes.run([processes.start("training", command)], print)
    return [line for line in map(json.loads, metrics.read_text().splitlines()) if "step" in line]


def rows(size: Size, steps: Sequence[dict[str, Any]], *, judged: bool) -> Iterator[Row]:
    """What is told of ours; a small run has no targets."""
    mfu, waits = ([m[name] for m in steps] for name in ("mfu_percent", "data_wait_percent"))
    utilisation, waited = statistics.median(mfu), statistics.median(waits)
    large = judged and size.parameters >= LEAST_JUDGED
    yield Row(
        f"{size}: model FLOPs utilisation",
        f"{utilisation:.1f} % (worst step {min(mfu):.1f} %)",
        f">= {MFU_PERCENT:g} %" if large else "",
        utilisation >= MFU_PERCENT if large else None,
    )
    yield Row(
        "wait for data servers, share of a step",
        f"{waited:.2f} % (worst step {max(waits):.2f} %)",
        f"< {WAIT_PERCENT:g} %" if judged else "",
        waited < WAIT_PERCENT if judged else None,
    )
    tokens = statistics.median(m["tokens_per_second"] for m in steps)
    images = statistics.median(m["images_per_second"] for m in steps)
    yield Row("throughput of all devices", f"{tokens:,.0f} tokens/s, {images:,.1f} images/s", "", None)


def record(folder: Path, device: str, devices: int, found: Sequence[Row]) -> Path:
    """Write down what was measured, one file for each kind of device."""
    name = "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split())
    path = folder / f"gpu-{devices}x-{name}.md"
    folder.mkdir(parents=True, exist_ok=True)
    table = "".join(f"| {row.name} | {row.measured} | {row.target} |\n" for row in found)
    path.write_text(
        f"# {devices} x {device}\n\nMeasured by `scripts/bench_gpu.py` with torch {torch.__version__}.\n\n"
        f"| what | measured | target |\n|---|---|---|\n{table}"
    )
    return path


def main() -> int:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny modules on a CPU")
    parser.add_argument("--steps", type=int, default=60, help="steps to measure (default 60)")
    parser.add_argument("--warm-up", type=int, default=10, help="steps before them (default 10)")
    parser.add_argument("--shards", type=Path, help="indexed shards of JPEGs to train on; by default some are made")
    parser.add_argument("--samples", type=int, default=20_000, help="image-text pairs in shards made (default 20000)")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the record (docs/internal/benchmarks)")
    given = parser.parse_args()
    devices = 1 if given.small else torch.cuda.device_count()
    if not devices:
        sizes = "; or ".join(map(str, SIZES))
        print(f"There is no GPU, so nothing is measured. With some, the first that fits would be trained: {sizes}.")
        return NOTHING_MEASURED
    device = "CPU" if given.small else torch.cuda.get_device_name(0)
    size = SMALL if given.small else fitting(torch.cuda.mem_get_info(0)[1], devices)
    if size is None:
        print(f"{SIZES[-1]} does not fit {devices} x {device}; nothing is measured.")
        return NOTHING_MEASURED
    print(f"{devices} x {device}: {size}")
    with tempfile.TemporaryDirectory() as name:
        folder, total = Path(name), given.warm_up + given.steps
        shards = given.shards or make_shards(folder, given.samples)
        steps = train(folder, size, devices, total, shards, small=given.small)[given.warm_up :]
        found = list(rows(size, steps, judged=not given.small))
        record(given.records, device, devices, found)  # the rival may take long
        images = max(1, round(statistics.median(m["images"] for m in steps) / devices))
        busy_s = statistics.median(m["seconds"] * (1 - m["data_wait_percent"] / 100) for m in steps)
        rival = statistics.median(rival_waits(shards, images, busy_s, min(20, given.steps)))
    found.append(Row("webdataset in the trainer's process, as much work: wait", f"{rival:.2f} %", "", None))
    print(f"the record is {record(given.records, device, devices, found)}")
    return report(found)


if __name__ == "__main__":
    sys.exit(main())
