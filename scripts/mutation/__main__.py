"""`scripts/mutate`: draws mutants, runs their tests, and prints what survived."""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutation.covering import KERNELS, Covering
from mutation.equivalents import equivalents, key, row
from mutation.mutants import Mutant, sample, source_files
from mutation.recording import records
from mutation.running import Verdict, judge
from mutation.trees import ROOT, Tree

FOLDERS = (
    "dataserver/planning",
    "dataserver/dataset",
    "dataserver/preprocessing",
    "dataserver/serving",
    "trainclient/stream",
    "trainclient/parallel",
)
REACH = 90
"""Percent of the mutants that the tests must notice."""


def main() -> int:
    """Draw, judge and print."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="folders or files to change; all by default")
    parser.add_argument("--number", type=int, default=100, help="mutants to draw (default: 100)")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the draw; the same tree and seed draw the same mutants"
    )
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time (default: 2)")
    parser.add_argument("--tests", nargs="+", default=["tests/"], help="folders or files of the tests; all by default")
    parser.add_argument("--only", type=int, nargs="+", help="judge these of the drawn mutants alone, counted from 1")
    parser.add_argument("--list", action="store_true", help="print the drawn mutants and run nothing")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    mutants = sample(ROOT, source_files(ROOT, options.folders), options.number, seed)
    print(f"Seed {seed}: {len(mutants)} mutants.", flush=True)
    numbers = options.only or range(1, len(mutants) + 1)
    if options.list:
        for number in numbers:
            print(f"{number}. {mutants[number - 1].place}\n{_difference(mutants[number - 1])}")
        return 0
    verdicts = list(_judged(mutants, numbers, options))
    return _report(verdicts, seed)


def _judged(mutants: Sequence[Mutant], numbers: Sequence[int], options: argparse.Namespace) -> Iterator[Verdict]:
    """The verdict of each mutant that is not known to be equivalent, printed as it comes."""
    known = equivalents()
    covering = Covering(records(options.tests, options.workers))
    trees: SimpleQueue[Tree] = SimpleQueue()
    for worker in range(options.workers):
        trees.put(Tree(f"worker-{worker}"))

    def one(number: int) -> Verdict | None:
        mutant = mutants[number - 1]
        if (reason := known.get(key(mutant))) is not None:
            print(f"{number:4d} equivalent  {mutant.place}: {reason}", flush=True)
            return None
        tree = trees.get()
        try:
            verdict = judge(mutant, tree, covering)
        finally:
            trees.put(tree)
        name = "killed" if verdict.killed else "SURVIVED"
        print(f"{number:4d} {name:10s}  {mutant.place}: {verdict.why} ({verdict.seconds:.0f} s)", flush=True)
        if not verdict.killed:
            print(_difference(mutant), flush=True)
        return verdict

    with ThreadPoolExecutor(options.workers) as pool:
        yield from filter(None, pool.map(one, numbers))


def _report(verdicts: Sequence[Verdict], seed: int) -> int:
    """Print the score of each folder and of all; the exit code is 1 where it is too low."""
    drawn = Counter(_folder(verdict.mutant) for verdict in verdicts)
    killed = Counter(_folder(verdict.mutant) for verdict in verdicts if verdict.killed)
    print(f"\n{'folder':36s} killed  of")
    for folder in sorted(drawn):
        print(f"{folder:36s} {killed[folder]:6d} {drawn[folder]:3d}")
    survivors = [verdict.mutant for verdict in verdicts if not verdict.killed]
    if survivors:
        print("\nSurvivors, as rows of docs/mutants.md for those that are equivalent:")
        print(*(row(mutant) for mutant in survivors), sep="\n")
    score = 100 * killed.total() / max(1, len(verdicts))
    print(f"\nSeed {seed}: {killed.total()} of {len(verdicts)} mutants killed, {score:.1f} %; required are {REACH} %.")
    return int(score < REACH)


def _folder(mutant: Mutant) -> str:
    parts = Path(mutant.path).parts
    return "/".join(parts[: 3 if KERNELS in mutant.path else 2])


def _difference(mutant: Mutant) -> str:
    before, after = mutant.change
    return f"       - {before}\n       + {after}"


if __name__ == "__main__":
    sys.exit(main())
