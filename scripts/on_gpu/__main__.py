"""Makes every minute on a GPU count: stages with a time of their own, the most valuable ones first.

Each stage runs in processes of its own and is ended when its time is over; what it found until then, and how it
failed, is in the record, which is written again after every stage. The record is a Markdown file and a JSON file of one
name, with the logs, and the profiled step's trace if it is small, beside them.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from on_gpu import wheels
from on_gpu.processes import Ended, run_bounded
from on_gpu.record import Record, facts_of_machine
from on_gpu.telling import Told
from on_gpu.variants import variant

ROOT: Final = Path(__file__).parents[2]
RECORDS: Final = ROOT / "docs" / "internal" / "benchmarks"
LEAST_S: Final = 15.0
"""A stage is not begun with less time than that."""
PREPARE: Final = "prepare"


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the check: `python -m on_gpu.NAME`."""

    name: str
    about: str
    limit_s: float
    shards: bool = False
    """Whether it needs what is prepared."""


PREPARED: Final = Stage(PREPARE, "Shards and the kernels", 150)
"""Runs beside the first stage: it needs cores alone."""
STAGES: Final = (
    Stage("units", "Kernels: tests of attention and noise", 90),
    Stage("training", "Utilisation of the preset, and a profile of one step", 240, shards=True),
    Stage("pipelines", "Runs of several processes over NCCL", 200, shards=True),
    Stage("planned", "The step as it is planned from a profile, beside the measured one", 75, shards=True),
    Stage("rivals", "webdataset's loader and transformers' loop beside ours", 75, shards=True),
)
"""Stages in the order of their value."""


def main() -> int:
    """Run what is asked for; 0 unless a stage failed."""
    given = _arguments()
    if given.make_wheels is not None:
        try:
            size = wheels.make(given.make_wheels, given.python)
        except wheels.WheelError as error:
            return _refuse(error)
        print(f"{len(list(given.make_wheels.iterdir()))} wheels of {size / 1e6:.1f} MB are in {given.make_wheels}")
        return 0
    known = [stage.name for stage in STAGES]
    chosen = given.stages.split(",") if given.stages else known
    if unknown := sorted(set(chosen) - set(known)):
        return _refuse(ValueError(f"there is no stage {unknown[0]!r}; use {', '.join(known)}"))
    try:
        words = {"training": tuple(name for name in given.variants.split(",") if variant(name))}
    except ValueError as error:
        return _refuse(error)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        try:
            environment = _environment(work, given.wheels)
        except wheels.WheelError as error:
            return _refuse(error)
        check = Check(work, given.output, environment, began + given.limit_s, given.small, words)
        return check.run([stage for stage in STAGES if stage.name in chosen])


@dataclass(frozen=True, slots=True)
class Check:
    """All stages of one call."""

    work: Path
    """Folder that all stages share."""
    output: Path
    """Folder that the record goes to."""
    environment: Mapping[str, str]
    ends: float
    """When no more time is left, by `time.monotonic`."""
    small: bool
    words: Mapping[str, tuple[str, ...]]
    """More arguments of stages, by their names."""

    def run(self, stages: list[Stage]) -> int:
        """Run them one after the other; what they need is prepared beside the first."""
        wrong = 0
        with ThreadPoolExecutor(1) as beside:
            preparing: Future[Ended] | None = None
            if any(stage.shards for stage in stages):
                preparing = beside.submit(self._bounded, PREPARED)
            record = Record(self.output, self.work, facts_of_machine(self.environment), small=self.small)
            for stage in stages:
                if stage.shards and preparing is not None:
                    _tell(record, PREPARED, preparing.result(), self.work)
                    preparing = None
                if why := self._obstacle(stage):
                    record.skipped(stage.name, stage.about, why)
                    print(f"{stage.name}: not run, {why}", flush=True)
                    wrong += 1
                    continue
                print(f"{stage.name}: {stage.about} ...", flush=True)
                wrong += not _tell(record, stage, self._bounded(stage), self.work)
        print(f"the record is {record.path}")
        return 1 if wrong else 0

    def _obstacle(self, stage: Stage) -> str:
        """Why a stage cannot be run; empty if it can."""
        if self.ends - time.monotonic() < LEAST_S:
            return "no time was left"
        prepared = Told.read(self.work / f"{PREPARE}.json").data.get("shards")
        return "there are no shards" if stage.shards and not prepared else ""

    def _bounded(self, stage: Stage) -> Ended:
        limit = min(stage.limit_s, self.ends - time.monotonic())
        command = [sys.executable, "-m", f"on_gpu.{stage.name}", self.work, f"{limit:.0f}"]
        command += [*self.words.get(stage.name, ()), *(["--small"] if self.small else [])]
        return run_bounded(command, limit, self.work / f"{stage.name}.log", self.environment)


def _tell(record: Record, stage: Stage, ended: Ended, work: Path) -> bool:
    """Write down what a stage found; whether it ended well."""
    told = Told.read(work / f"{stage.name}.json")
    record.add(stage.name, stage.about, ended, told)
    print(f"{stage.name}: {ended.how}, {ended.seconds:.0f} s", flush=True)
    for table in told.tables[:1]:
        print(table.markdown(), flush=True)
    if ended.code != 0:
        print(ended.tail(12), flush=True)
    return ended.code == 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    stages = "".join(f"\n  {s.name:10} {s.about} (at most {s.limit_s:g} s)" for s in STAGES)
    parser.add_argument("--stages", help=f"some of them, with commas between:{stages}")
    parser.add_argument("--variants", default="base", help="of the training, by the names in on_gpu/variants.py")
    parser.add_argument("--limit-s", type=float, default=480, help="time of all stages together (default 480)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, without a network")
    parser.add_argument("--output", type=Path, default=RECORDS, help="folder of the record (docs/internal/benchmarks)")
    parser.add_argument("--small", action="store_true", help="stand-ins on a CPU, to try the check itself")
    parser.add_argument("--make-wheels", type=Path, help="gather those wheels in a folder, and do nothing else")
    parser.add_argument("--python", default="3.12", help="version of Python that the wheels are for (default 3.12)")
    return parser.parse_args()


def _environment(work: Path, folder: Path | None) -> dict[str, str]:
    """Variables for all stages: they find the checkout and what was installed, and no other packages of ours."""
    paths = [ROOT, ROOT / "protos", ROOT / "scripts", ROOT / "tests"]
    if folder is not None:
        paths.insert(0, work / "site")
        wheels.install(folder, paths[0])
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {"PYTHONPATH": os.pathsep.join([*map(str, paths), *inherited])}


def _refuse(error: Exception) -> int:
    print(f"gpu_check: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
