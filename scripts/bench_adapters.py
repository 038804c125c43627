#!/usr/bin/env python
"""Training loops of other frameworks: each over a loader of its own, and over ours through its adapter.

Two ranks train a model of one weight, in whose place a sleep takes as long as what it is handed would cost (scripts/
adapter_loops). Images are patches in uint8 everywhere; the CPU time counted is that of the processes that train and of
those that they start: ours leaves out the data server, which is what it is for. Imbalance is that of costs without
padding, most over mean of a step. Every framework's own loader is judged as its users run it, decoding with Pillow
(`plain`); what it takes with the faster decoder of scripts/loaders, and with other options of its own, is told beside
it. In every round
each runs once, in another order, over the same shards; times are shown as measured. Frameworks that are not installed
are named: --install puts them under build/loaders. The exit code is 1 if a target is missed.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from adapter_loops.job import SERVED
from adapter_loops.measuring import RANKS, RankReport
from benchmarks.rows import Row, report
from demo_parts.processes import FailedError, Processes
from loaders.installing import install, python_of

HERE = Path(__file__).resolve().parent
CPU = 0.35
"""Most CPU time of an image on the processes that train, over that of the framework's own loader."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A training loop, in scripts/adapter_loops."""

    name: str
    program: str
    needs: str
    """The package that its own loader is in."""
    own: str
    """The framework's own loader, in words."""
    others: tuple[str, ...] = ("fast",)
    """Loaders that are told and not judged."""
    environment: str | None = None

    @property
    def python(self) -> Path | None:
        """What runs it; None if it is not installed."""
        if self.environment is not None and (python := python_of(self.environment)) is not None:
            return python
        return Path(sys.executable) if any(distributions(name=self.needs)) else None


JUDGED = "plain"
FRAMEWORKS = (
    Framework(
        "Hugging Face Trainer",
        "huggingface",
        "transformers",
        "data set, collator, 2 workers",
        ("fast", "fast+rebalanced"),
    ),
    Framework("Lightning", "lightning", "lightning", "webdataset, 2 workers", environment="lightning"),
    Framework("Grain", "grain", "grain", "source by number, 2 threads, first-fit packing", environment="grain"),
    Framework(
        "torchtitan",
        "torchtitan",
        "torchtitan",
        "its loader of image-text shards, 2 workers",
        ("packed",),
        environment="torchtitan",
    ),
    Framework(
        "Megatron",
        "megatron",
        "megatron-energon",
        "Megatron-Energon, 2 workers, packing",
        environment="megatron-energon",
    ),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of all ranks."""

    cpu_ms: float
    """CPU time for each image."""
    wait_ms: float
    """Time that ranks waited for each image."""
    padding: float
    """Share of the cost of what the model is handed."""
    excess: float
    """Imbalance above 1: most over mean cost of the ranks in a step, mean over steps."""
    lines: int
    images: int

    @classmethod
    def of(cls, ranks: Sequence[RankReport]) -> "Measured":
        """Make it from the reports of all ranks."""
        images = sum(rank.images for rank in ranks)
        steps = list(zip(*(rank.cost for rank in ranks), strict=True))
        return cls(
            cpu_ms=sum(rank.cpu_s for rank in ranks) / images * 1e3,
            wait_ms=sum(rank.wait_s for rank in ranks) / images * 1e3,
            padding=1 - sum(map(sum, steps)) / sum(rank.handed for rank in ranks),
            excess=statistics.mean(max(step) / statistics.mean(step) for step in steps) - 1,
            lines=ranks[0].lines,
            images=images,
        )


Found = dict[tuple[str, str], list[Measured]]
"""Runs by framework and loader."""


def run(framework: Framework, loader: str, shards: Path, out: Path, server: str, processes: Processes) -> Measured:
    """Train through one loader, to the end."""
    out.mkdir(parents=True)
    line = [framework.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS]
    path = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent / "protos")))
    child = processes.start(
        f"{framework.program} {loader}",
        [*line, "-m", f"adapter_loops.{framework.program}", loader, shards, out, server],
        {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    try:
        processes.run([child], lambda _: None)
    except FailedError:
        print(child.log.read_text(errors="replace"), file=sys.stderr)  # torchrun says last that, not why
        raise
    return Measured.of([RankReport(**json.loads((out / f"{rank}.json").read_text())) for rank in range(RANKS)])


def rows(
    found: Found, frameworks: Sequence[Framework] = FRAMEWORKS, failed: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Ratios are medians over rounds of ratios within a round; `failed` says of frameworks why they are missing."""
    for framework in frameworks:
        name = framework.name
        if (name, SERVED) not in found:
            why = (failed or {}).get(name, "it is not installed; --install does that")
            yield Row(name, f"not measured: {why}", "", None)
            continue
        for loader in (JUDGED, *framework.others, SERVED):
            title = "ours" if loader == SERVED else f"{framework.own}, {loader}"
            yield Row(f"{name}: {title}", _told(found[name, loader]), "", None)
        yield _judged(f"{name}: CPU, ours over its own", found, name, "cpu_ms", CPU)
        for other in framework.others:
            yield _judged(f"{name}: CPU, ours over its own with {other}", found, name, "cpu_ms", None, other)
        yield _judged(f"{name}: padding", found, name, "padding", 1)
        yield _judged(f"{name}: imbalance, what is above 1", found, name, "excess", 1)


def _told(runs: list[Measured]) -> str:
    cpu, wait, padding, excess = (
        statistics.median(getattr(run, what) for run in runs) for what in ("cpu_ms", "wait_ms", "padding", "excess")
    )
    return (
        f"{cpu:.2f} ms CPU and {wait:.2f} ms of waiting for each image, padding {padding:.1%}, imbalance "
        f"{1 + excess:.4f}, {runs[0].lines} lines; {runs[0].images} images"
    )


def _judged(title: str, found: Found, name: str, what: str, most: float | None, other: str = JUDGED) -> Row:
    """The median ratio of ours to another loader; the target is at most `most`, and in any case less than 1."""
    pairs = zip(found[name, SERVED], found[name, other], strict=True)
    ratio = statistics.median(getattr(ours, what) / getattr(theirs, what) for ours, theirs in pairs)
    if most is None:
        return Row(title, f"{ratio:.3f} x", "", None)
    return Row(title, f"{ratio:.3f} x", f"<= {most} x" if most < 1 else "< 1 x", ratio <= most and ratio < 1)


def run_rounds(frameworks: Sequence[Framework], samples: int, rounds: int, processes: Processes, folder: Path) -> Found:
    """Run all loaders of these frameworks over new shards."""
    shards = folder / "shards"
    processes.indexed_pairs(shards, "--samples", samples, "--shards", 8)
    server = processes.serve_pairs(shards, "--insecure")
    runs = [(framework, loader) for framework in frameworks for loader in (JUDGED, *framework.others, SERVED)]
    found: Found = {(framework.name, loader): [] for framework, loader in runs}
    for number in range(rounds):
        for at, (framework, loader) in enumerate(random.Random(number).sample(runs, len(runs))):
            one = run(framework, loader, shards, folder / f"out-{number}-{at}", server, processes)
            found[framework.name, loader].append(one)
            print(f"round {number + 1}: {framework.name}, {loader}: {_told([one])}", flush=True)
    return found


def main() -> int:
    """Measure all frameworks, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=800, help="in the shards (default 800)")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--only", choices=[f.program for f in FRAMEWORKS], help="one framework alone")
    parser.add_argument("--install", action="store_true", help="install the frameworks that want environments")
    given = parser.parse_args()
    wanted = [f for f in FRAMEWORKS if given.only in (None, f.program)]
    failed: dict[str, str] = {}
    for framework in wanted:
        if given.install and framework.environment is not None:
            try:
                install(framework.environment)
            except SystemExit as error:
                failed[framework.name] = str(error)
    there = [framework for framework in wanted if framework.python is not None]
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        try:
            found = run_rounds(there, given.samples, given.rounds, processes, Path(folder))
        except FailedError as error:
            sys.exit(str(error))
    return report(rows(found, wanted, failed))


if __name__ == "__main__":
    sys.exit(main())
