#!/usr/bin/env python
"""Writes the decision table of docs/layouts.md: which layout is fastest on which cluster for which sizes of samples.

Every cell is what `trainclient orchestrate` solves: the best choice of each layout, planned and simulated for one step.
Without `--check` the table is written into the page; with it, the exit code is 1 if the page holds another one.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dataserver.planning.job.fields import ModelSize
from trainclient.orchestrate.choice import Choice, NoLayoutError, Problem
from trainclient.orchestrate.cluster import Cluster, cluster
from trainclient.orchestrate.job_execution import execution_block
from trainclient.orchestrate.networks import Network, read_network
from trainclient.orchestrate.rescoring import simulate
from trainclient.orchestrate.sample_sizes import SampleSize
from trainclient.orchestrate.solving import solvers_of
from trainclient.orchestrate.workload import Stream, workload

PAGE: Final = Path(__file__).parents[1] / "docs" / "layouts.md"
BEGIN, END = "<!-- decision table: scripts/decide_layouts.py -->", "<!-- end of the decision table -->"

CLUSTERS: Final[Mapping[str, Cluster]] = {
    "8 H200, one node": cluster("h200", 8),
    "64 H100, 400 Gb/s for each GPU": cluster("h100", 64),
    "128 A800, 100 Gb/s for each GPU": cluster("a800", 128),
}
COLUMNS: Final = ("pipelined", "colocated", "grouped", "contrastive", "monolithic")
SMALL: Final = ModelSize(28, 3072, 8192, 24, 8, 128_256)
"""A backbone of 3B (Llama 3.2's sizes)."""
SIZES: Final[Mapping[str, tuple[tuple[SampleSize, ...], Stream]]] = {
    "captions: small images, short texts, packed to 8,192": (
        (SampleSize(1, 40, (256,)),), Stream(256, 8192),
    ),
    "pictures: captions, half of them generated": (
        (SampleSize(1, 40, (1024,)),), Stream(256, 8192, generation=0.5),
    ),
    "documents: 1 to 8 large images, packed to 32,768": (
        tuple(SampleSize(1, 500 * n, (4096,) * n) for n in (1, 2, 4, 8)), Stream(128, 32_768),
    ),
    "long texts, unpacked, up to 131,072": (
        tuple(SampleSize(1 << (7 - p), 1000 << p, ()) for p in range(8)), Stream(256, 131_072, packed=False),
    ),
    "pairs: towers of images and of texts, contrastive batches of 4,200": (
        (SampleSize(1, 40, (256,)),), Stream(4200, 77, packed=False, contrastive_batch=4200),
    ),
}  # fmt: skip


def problem(devices: Cluster, sizes: tuple[SampleSize, ...], stream: Stream) -> Problem:
    """ViT-H and a backbone of 3B; a generator where pictures are generated, and no encoder of texts alone.

    Of pairs ViT-H and the tower of texts that OpenCLIP has beside it.
    """
    networks: list[Network] = []
    if stream.contrastive_batch is not None:
        towers = read_network("tower", "vit-h", "image", "image"), read_network("tower", "clip-text-h", "text", "text")
        return Problem(towers, devices, workload(sizes, stream))
    if any(s.patches for s in sizes):
        networks.append(read_network("encoder", "vit-h"))
    networks.append(Network("backbone", "backbone", SMALL, input_gradient=bool(networks)))
    if stream.generation:
        made = read_network("generator", "dit-1b")
        networks.append(replace(made, input_gradient=True, condition_width=SMALL.width))
    return Problem(tuple(networks), devices, workload(sizes, stream))


def table() -> str:
    """Return the decision table as Markdown."""
    lines = ["| samples | cluster | " + " | ".join(COLUMNS) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for about, (sizes, stream) in SIZES.items():
        for where, devices in CLUSTERS.items():
            print(f"{about}, {where}", file=sys.stderr, flush=True)
            lines.append(f"| {about} | {where} | " + " | ".join(_cells(problem(devices, sizes, stream))) + " |")
    return "\n".join(lines)


def _cells(one: Problem) -> list[str]:
    """Return a cell for each layout: the time of its best choice over the fastest; for the fastest in bold its time and
    MFU."""
    found: dict[str, tuple[Choice, float]] = {}
    solvers = solvers_of(one)
    for name, solver in solvers.items():
        try:
            choice = solver(one)[0]
        except NoLayoutError:
            continue
        found[name] = choice, simulate(one, choice, execution_block(one, choice), range(1)).mean_ns
    best = min((time for _, time in found.values()), default=0.0)
    missing = {name: "does not fit" if name in solvers else "-" for name in COLUMNS}
    return [_cell(one, *found[name], best) if name in found else missing[name] for name in COLUMNS]


def _cell(one: Problem, choice: Choice, time: float, best: float) -> str:
    if time > best:
        return f"{time / best:.2f} x"
    return f"**{time / 1e9:.2f} s**, MFU {100 * choice.mfu(one) * choice.step_ns / time:.0f} %"


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare it with the page's, and write nothing")
    check = parser.parse_args().check
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"
    if check:
        print(
            "the table is that of the page" if made == text else "the page has another table; run this without --check"
        )
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
