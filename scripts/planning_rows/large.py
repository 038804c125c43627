"""Rows of steps that take seconds to plan: on several cores, of many sequences, and within so much memory."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar
from unittest.mock import patch

from benchmarks.calibration import slowdown, timed
from benchmarks.rows import Row

import dataserver.planning
from dataserver.planning import computing_on
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.pipelined.placing import search
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.samples import StepSamples
from planning_rows.steps import drawn_sizes, make_job, resampled

FASTER, MOST_S, MOST_MB = 1.8, 6, 2_048
"""Targets: two cores over one; CPU seconds of 64,000 sequences; memory of the largest step."""
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Large:
    """Steps of as many sequences as samples."""

    sequences: int
    ranks: int
    images_dp: int
    stages: int
    sigma: float
    seeds: range

    @property
    def title(self) -> str:
        """Describe the steps for people."""
        return (
            f"{self.sequences:,} unpacked sequences on {self.ranks:,} ranks x {self.stages} stages, sigma {self.sigma}"
        )

    def job(self) -> Job:
        """Make the job, without memory limits."""
        return make_job(self.ranks, self.sequences, self.images_dp, stages=self.stages, packed=False)

    def samples(self, job: Job, seed: int) -> StepSamples:
        """Draw the samples of one step."""
        return resampled(job, drawn_sizes(self.sigma), self.sequences, seed)


SHARED = Large(15_360, 1_024, 256, 8, 0.6, range(3)), Large(10_240, 640, 320, 6, 0.9, range(100, 103))
MANY = Large(64_000, 64, 64, 8, 0.6, range(1)), Large(48_000, 160, 40, 6, 0.9, range(100, 101))
LARGEST = Large(102_400, 10_240, 1_024, 8, 0.6, range(1))
"""About as many passes of microbatches through stages as a step may have (`job.limits`)."""


def rows() -> list[Row]:
    """All rows of this part; takes some minutes."""
    return [*map(_on_two_cores, SHARED), *map(_many, MANY), _largest()]


def _on_two_cores(case: Large) -> Row:
    """By CPU time, so that a busy machine can show it: what two threads share counts as the longer of them takes.

    Both times are of one run, in which the parts of two threads follow each other. What it costs that they wait for the
    interpreter's lock is left out.
    """
    job, faster, one = case.job(), list[float](), list[float]()
    for seed in case.seeds:
        samples, saved = case.samples(job, seed), list[float]()
        if seed == case.seeds[0]:
            alone = plan_step(job, 0, samples).hash
        before = slowdown()
        with computing_on(2), _threads_in_turn(saved):
            started = time.thread_time()
            plan = plan_step(job, 0, samples)
            spent = time.thread_time() - started
        one.append(1_000 * spent / ((before + slowdown()) / 2))
        faster.append(spent / (spent - sum(saved)))
        if seed == case.seeds[0] and plan.hash != alone:
            raise RuntimeError(f"the plan of seed {seed} depends on the number of threads")
    text = f"{median(faster):.2f} x as fast (least {min(faster):.2f}); {median(one):.0f} ms of CPU in all"
    return Row(f"a plan on two cores: {case.title}", text, f">= {FASTER} x", median(faster) >= FASTER)


@contextmanager
def _threads_in_turn(saved: list[float]) -> Iterator[None]:
    """Call in turn what would be called side by side, and note the seconds that would be saved."""

    def in_turn(calls: Sequence[Callable[[], Result]], threads: int) -> list[Result]:
        found, times, ends = list[Result](), list[float](), [0.0] * threads
        for call in calls:
            started = time.thread_time()
            found.append(call())
            times.append(time.thread_time() - started)
            ends[ends.index(min(ends))] += times[-1]  # the first thread that is done takes the next call
        saved.append(sum(times) - max(ends))
        return found

    with patch.object(dataserver.planning, "side_by_side", in_turn), patch.object(search, "side_by_side", in_turn):
        yield


def _many(case: Large) -> Row:
    job, spent = case.job(), []
    warm = Large(640, case.ranks, case.images_dp, case.stages, case.sigma, case.seeds)
    plan_step(warm.job(), 0, warm.samples(warm.job(), 0))
    for seed in case.seeds:
        spent.append(timed(plan_step, job, 0, case.samples(job, seed))[1] / 1_000)
    allowed = MOST_S * case.sequences / MANY[0].sequences
    return Row(f"a plan: {case.title}", f"{median(spent):.1f} CPU-s", f"<= {allowed:g} CPU-s", max(spent) <= allowed)


def _largest() -> Row:
    """The largest step, in a process of its own, whose memory is told."""
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("large_step.py"))], capture_output=True, text=True, check=True
    )
    seconds, before, most = (float(word) for word in run.stdout.split())
    text = f"{most:,.0f} MB, {before:,.0f} of them before, {seconds:.1f} CPU-s"
    return Row(f"memory of a plan: {LARGEST.title}", text, f"<= {MOST_MB:,} MB", most <= MOST_MB)
