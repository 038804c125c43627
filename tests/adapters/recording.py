"""Runs a script, and notes every microbatch that its stream hands out: recording.py FOLDER STEP SCRIPT ARGUMENT ...

It stops for ever where it reads the step, to be killed there.
"""

import json
import os
import runpy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

Sample = tuple[int, int, int]
"""Dataset, pass and number."""


def recorded(folder: Path) -> dict[int, Counter[Sample]]:
    """The samples of each step, as all ranks of one run have read them."""
    found = dict[int, Counter[Sample]]()
    for step, _, _, samples in _lines(folder):
        found.setdefault(step, Counter()).update((*s,) for s in samples)
    return found


def images_in(folder: Path) -> dict[tuple[int, int], list[bool]]:
    """Which ranks had images in each microbatch of each step."""
    found = dict[tuple[int, int], list[bool]]()
    for step, microbatch, images, _ in _lines(folder):
        found.setdefault((step, microbatch), []).append(images)
    return found


def _lines(folder: Path) -> Iterator[Any]:
    for file in folder.glob("*.jsonl"):
        *lines, _unfinished = file.read_text().split("\n")
        yield from map(json.loads, lines)


def num_ranks_in(step: int, folder: Path) -> int:
    """Ranks that have read something of a step."""
    return sum(f"\n[{step}, " in "\n" + file.read_text() for file in folder.glob("*.jsonl"))


def _note(folder: Path, last_step: int, step: int, microbatch: int, images: bool, samples: Iterable[Sample]) -> None:
    with (folder / f"{os.environ.get('RANK', 0)}.jsonl").open("a") as lines:
        lines.write(json.dumps([step, microbatch, images, list(samples)]) + "\n")
    while step == last_step:
        time.sleep(1)


def _record_streams(note: Callable[..., None]) -> None:
    from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream

    inner = FullModelStream._next

    def noted(stream: FullModelStream) -> FullModelMicrobatch:
        found = inner(stream)
        items = found.backbone.items
        samples = zip(items.dataset.tolist(), items.epoch.tolist(), items.sample.tolist(), strict=True)
        note(found.backbone.step, found.backbone.microbatch, bool(len(found.rows)), samples)
        return found

    FullModelStream._next = noted  # type: ignore[method-assign]


def _record_samplers(note: Callable[..., None]) -> None:
    """Of a loader without workers, which asks for a batch when it is read; of one dataset, and one pass."""
    from dataserver.planning.plan.views import view_plan
    from trainclient.adapters.loader_planner import PlannedBatches

    def noted(sampler: PlannedBatches) -> Iterator[list[int]]:
        planner, rank = sampler.planner, sampler.rank
        spec = planner.job.spec
        for step in range(sampler.start_step, planner.num_steps):
            for number, batch in enumerate(planner.batches(step, rank)):
                view = view_plan(spec, planner.plan(step), spec.execution.backbone.name, rank, number)
                note(step, number, any(len(r.rows) for r in view.routings), [(0, 0, sample) for sample in batch])
                yield batch

    PlannedBatches.__iter__ = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    _, folder, step, *sys.argv = sys.argv
    record = _record_samplers if "LoaderPlanner(" in Path(sys.argv[0]).read_text() else _record_streams
    record(partial(_note, Path(folder), int(step)))
    runpy.run_path(sys.argv[0], run_name="__main__")
