"""Runs a script, and notes every microbatch that its stream hands out: recording.py FOLDER STEP SCRIPT ARGUMENT ...

It stops for ever where it reads the step, to be killed there.
"""

import json
import os
import runpy
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from trainclient.adapters.whole_rank import WholeMicrobatch, WholeRankStream

Sample = tuple[int, int, int]
"""Dataset, pass and number."""


def recorded(folder: Path) -> dict[int, Counter[Sample]]:
    """The samples of each step, as all ranks of one run have read them."""
    found = dict[int, Counter[Sample]]()
    for file in folder.glob("*.jsonl"):
        *lines, _unfinished = file.read_text().split("\n")
        for line in lines:
            step, samples = json.loads(line)
            found.setdefault(step, Counter()).update((*s,) for s in samples)
    return found


def num_ranks_in(step: int, folder: Path) -> int:
    """Ranks that have read something of a step."""
    return sum(f"\n[{step}, " in "\n" + file.read_text() for file in folder.glob("*.jsonl"))


def _record(folder: Path, last_step: int) -> None:
    inner = WholeRankStream._next
    file = folder / f"{os.environ.get('RANK', 0)}.jsonl"

    def note(stream: WholeRankStream, *arguments: Any) -> WholeMicrobatch:
        microbatch = inner(stream, *arguments)
        items = microbatch.backbone.items
        samples = zip(items.dataset.tolist(), items.pass_.tolist(), items.sample.tolist(), strict=True)
        with file.open("a") as lines:
            lines.write(json.dumps([microbatch.backbone.step, list(samples)]) + "\n")
        while microbatch.backbone.step == last_step:
            time.sleep(1)
        return microbatch

    WholeRankStream._next = note  # type: ignore[method-assign]


if __name__ == "__main__":
    _, folder, step, *sys.argv = sys.argv
    _record(Path(folder), int(step))
    runpy.run_path(sys.argv[0], run_name="__main__")
