#!/usr/bin/env python
"""CPU time of an image from shard to tensor: this service beside loaders that decode in the trainer's own processes.

All read the same shards and make the same batches, and all but ours share one decode function (scripts/loaders). In
every round each runs once, in another order; CPU time is that of all its processes, workers, servers and consumer,
between a warm-up and the end. Ratios are to the floor: as many serial loops at once as there are cores, since busy
cores slow each other down. The exit code is 1 if a ratio misses its target.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from benchmarks.rows import Row, report

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to load images."""

    name: str
    program: str
    """In scripts/loaders."""
    option: str
    """Decode function, or views."""
    copies: int = 1
    """Run at once."""
    target: float | None = None
    """Most CPU time of an image, as a share of the floor's."""


SERIAL, FLOOR = "serial loop", "serial loops, one for each core"
ENCODER, ALL = "this service, encoder view", "this service, views of three modules"
CONTENDERS = (
    Contender(SERIAL, "serial", "fast"),
    Contender(FLOOR, "serial", "fast", copies=os.cpu_count() or 1),
    Contender(ENCODER, "service", "encoder", target=1.15),
    Contender(ALL, "service", "all", target=1.25),
    Contender("torch DataLoader, 2 workers", "dataloader", "fast"),
    Contender("webdataset, 2 workers", "webdataset_loader", "fast"),
    Contender("torch DataLoader, 2 workers, plain Pillow", "dataloader", "plain"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a contender."""

    cpu_ms: float
    """Of an image, all processes together."""
    images_per_s: float
    pss_mb: float
    """Of all processes, pages that they share counted once."""
    first_s: float
    """From the start of its programs to the first batch."""


def run(contender: Contender, shards: Path, count: int) -> Measured:
    """Run a contender once, over `count` images in each copy."""
    command = [sys.executable, "-m", f"loaders.{contender.program}", str(shards), str(count), contender.option]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    began = time.perf_counter()
    copies = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(contender.copies)
    ]
    try:
        _expect(copies, "first")
        first_s = time.perf_counter() - began
        _go_on(copies)
        _expect(copies, "begin")
        start, cpu = time.perf_counter(), _cpu_s(copies)
        _go_on(copies)
        images = sum(int(line.split()[1]) for line in _expect(copies, "end"))
        cpu, wall_s, pss_mb = _cpu_s(copies) - cpu, time.perf_counter() - start, _pss_mb(copies)
        _go_on(copies)
        for copy in copies:
            copy.wait(30)
    finally:
        for copy in copies:
            for process in _tree([copy]):
                process.kill()
            copy.wait()
    return Measured(cpu / images * 1e3, images / wall_s, pss_mb, first_s)


def _expect(copies: list["subprocess.Popen[str]"], word: str) -> list[str]:
    lines = []
    for copy in copies:
        assert copy.stdout is not None
        line = copy.stdout.readline()
        if not line.startswith(word):
            raise SystemExit(f"{copy.args!r} said {line!r} instead of {word}; see its error above")
        lines.append(line)
    return lines


def _go_on(copies: list["subprocess.Popen[str]"]) -> None:
    for copy in copies:
        assert copy.stdin is not None
        copy.stdin.write("\n")
        copy.stdin.flush()


def _tree(copies: list["subprocess.Popen[str]"]) -> list[psutil.Process]:
    found = []
    for copy in copies:
        if copy.poll() is None:
            process = psutil.Process(copy.pid)
            found += [process, *process.children(recursive=True)]
    return found


def _cpu_s(copies: list["subprocess.Popen[str]"]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _tree(copies))


def _pss_mb(copies: list["subprocess.Popen[str]"]) -> float:
    return sum(process.memory_full_info().pss for process in _tree(copies)) / 1e6


def rows(found: dict[str, list[Measured]]) -> Iterator[Row]:
    """Ratios are medians over rounds of ratios within a round."""

    def ratio(name: str, base: str) -> float:
        pairs = zip(found[name], found[base], strict=True)
        return statistics.median(ours.cpu_ms / other.cpu_ms for ours, other in pairs)

    for contender in CONTENDERS:
        runs = found[contender.name]
        of_floor = ratio(contender.name, FLOOR)
        cpu, speed, pss, first = (
            statistics.median(getattr(r, f) for r in runs) for f in ("cpu_ms", "images_per_s", "pss_mb", "first_s")
        )
        yield Row(
            contender.name,
            f"{of_floor:.2f} x the floor, {ratio(contender.name, SERIAL):.2f} x serial; {cpu:.2f} ms CPU, "
            f"{speed:.0f} images/s, {pss:.0f} MB, first batch {first:.1f} s",
            "" if contender.target is None else f"<= {contender.target} x the floor",
            None if contender.target is None else of_floor <= contender.target,
        )
    for rival, target in (
        ("torch DataLoader, 2 workers", 1 / 1.05),
        ("torch DataLoader, 2 workers, plain Pillow", 3.5),
    ):
        times = ratio(rival, ENCODER)
        yield Row(f"{rival}, over ours", f"{times:.2f} x our encoder view", f">= {target:.2f} x", times >= target)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1500, help="in the shards (default 1500)")
    parser.add_argument("--count", type=int, default=3000, help="images of a run (default 3000)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    arguments = parser.parse_args()
    found: dict[str, list[Measured]] = {contender.name: [] for contender in CONTENDERS}
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        options = ["--samples", str(arguments.images), "--shards", "6"]
        make = [sys.executable, str(HERE / "make_demo_shards.py"), str(shards), *options]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(
            [sys.executable, "-m", "dataserver", "index", str(shards)], check=True, stdout=subprocess.DEVNULL
        )
        for number in range(arguments.rounds):
            for contender in random.Random(number).sample(CONTENDERS, len(CONTENDERS)):
                found[contender.name].append(run(contender, shards, arguments.count))
                print(f"round {number + 1}: {contender.name}: {found[contender.name][-1].cpu_ms:.2f} ms", flush=True)
    return report(rows(found))


if __name__ == "__main__":
    sys.exit(main())
