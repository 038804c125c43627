"""`scripts/mutate`: draws mutants, runs their tests, and prints what survived."""

import argparse
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from threading import Event

from mutation.covering import KERNELS, Covering
from mutation.equivalents import equivalents, key, row
from mutation.mutants import Mutant, sample, source_files
from mutation.recording import records
from mutation.running import Verdict, judge
from mutation.trees import ROOT, Tree

FOLDERS = (
    "dataserver/planning",
    "dataserver/dataset",
    "dataserver/images",
    "dataserver/assembly",
    "dataserver/serving",
    "trainclient/stream",
    "trainclient/exchange",
    "trainclient/program",
    "trainclient/topology",
)
REACH = 90
"""Percent of the mutants that the tests must notice."""
WORKERS = (os.cpu_count() or 1) + 1
"""Tests of processes and sockets wait as long as they compute."""


def main() -> int:
    """Draw mutants, judge them and print the outcome."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders or files to change; all by default")
    parser.add_argument("--number", type=int, default=100, help="mutants to draw (default: 100)")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draw; the same tree and seed draw the same mutants"
    )
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"mutants at a time (default: {WORKERS})")
    parser.add_argument("--tests", nargs="+", default=["tests/"], help="folders or files of the tests; all by default")
    parser.add_argument("--earlier", action="store_true", help="record no test again because what it tests has changed")
    parser.add_argument("--only", type=int, nargs="+", help="judge these of the drawn mutants alone, counted from 1")
    parser.add_argument("--list", action="store_true", help="print the drawn mutants and run nothing")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    mutants = sample(ROOT, source_files(ROOT, options.folders), options.number, seed)
    print(f"Seed {seed}: {len(mutants)} mutants.", flush=True)
    numbers = options.only or range(1, len(mutants) + 1)
    if options.list:
        for number in numbers:
            print(f"{number}. {mutants[number - 1].location}\n{_difference(mutants[number - 1])}")
        return 0
    # Also in the background, where shells have Ctrl-C's signal ignored; `kill` does the same.
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    verdicts, stopped = _judged(mutants, numbers, options)
    return _report(verdicts, seed, stopped)


def _judged(
    mutants: Sequence[Mutant], numbers: Sequence[int], options: argparse.Namespace
) -> tuple[list[Verdict], bool]:
    """The verdict of each mutant that is not known to be equivalent, printed as it comes; and whether Ctrl-C stopped
    it, which leaves those that were judged so far.
    """
    known = equivalents()
    covering = Covering(records(options.tests, options.workers, options.earlier))
    trees: SimpleQueue[Tree] = SimpleQueue()
    for worker in range(options.workers):
        trees.put(Tree(f"worker-{worker}"))

    verdicts: list[Verdict] = []
    stopping = Event()

    def one(number: int) -> None:
        mutant = mutants[number - 1]
        if stopping.is_set():
            return
        if (reason := known.get(key(mutant))) is not None:
            print(f"{number:4d} equivalent  {mutant.location}: {reason}", flush=True)
            return
        tree = trees.get()
        try:
            verdict = judge(mutant, tree, covering, stopping)
        finally:
            trees.put(tree)
        if verdict is not None:
            verdicts.append(verdict)
            print(_line(number, verdict), flush=True)

    with ThreadPoolExecutor(options.workers) as pool:
        try:
            for done in as_completed([pool.submit(one, number) for number in numbers]):
                done.result()
        except KeyboardInterrupt:
            return verdicts, True
        finally:
            stopping.set()
    return verdicts, False


def _line(number: int, verdict: Verdict) -> str:
    """What became of a mutant; of one that survived also what it changes."""
    name = "killed" if verdict.killed else "SURVIVED"
    took = f"{verdict.effort.computed_s:.0f} s of CPU, {verdict.effort.asleep_s:.0f} s asleep"
    line = f"{number:4d} {name:10s}  {verdict.mutant.location}: {verdict.why} ({took})"
    return line if verdict.killed else f"{line}\n{_difference(verdict.mutant)}"


def _report(verdicts: Sequence[Verdict], seed: int, stopped: bool) -> int:
    """Print the score of each folder and of all; the exit code is 1 where it is too low, or where it is not all's.

    Constants that survived stand apart and count as neither killed nor drawn: a number of ours that no user and no plan
    notices may change.
    """
    constants = [verdict.mutant for verdict in verdicts if not verdict.killed and verdict.mutant.of_constant]
    verdicts = [verdict for verdict in verdicts if verdict.killed or not verdict.mutant.of_constant]
    drawn = Counter(_folder(verdict.mutant) for verdict in verdicts)
    killed = Counter(_folder(verdict.mutant) for verdict in verdicts if verdict.killed)
    print(f"\n{'folder':36s} killed  of")
    for folder in sorted(drawn):
        print(f"{folder:36s} {killed[folder]:6d} {drawn[folder]:3d}")
    survivors = [verdict.mutant for verdict in verdicts if not verdict.killed]
    if survivors:
        print("\nSurvivors, as rows of scripts/mutation/equivalents.md for those that are equivalent:")
        print(*(row(mutant) for mutant in survivors), sep="\n")
    if constants:
        print("\nConstants that survived, which the score leaves out:")
        print(*(f"{mutant.location}\n{_difference(mutant)}" for mutant in constants), sep="\n")
    score = 100 * killed.total() / max(1, len(verdicts))
    judged = f"{len(verdicts)} mutants{' judged before it was stopped' if stopped else ''}"
    cpu_s = sum(verdict.effort.computed_s for verdict in verdicts) / max(1, len(verdicts))
    print(f"\n{cpu_s:.0f} s of CPU for each mutant.")
    print(f"Seed {seed}: {killed.total()} of {judged} killed, {score:.1f} %; required are {REACH} %.")
    return int(stopped or score < REACH)


def _folder(mutant: Mutant) -> str:
    parts = Path(mutant.path).parts
    return "/".join(parts[: 3 if KERNELS in mutant.path else 2])


def _difference(mutant: Mutant) -> str:
    before, after = mutant.change
    return f"       - {before}\n       + {after}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
