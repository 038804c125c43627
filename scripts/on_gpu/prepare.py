"""Makes shards, and has the kernels compiled beside it: both take cores alone."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

from demo_parts.processes import Processes

from on_gpu.serving import dataserver, make_shards
from on_gpu.telling import Given, given

SAMPLES, SMALL_SAMPLES = 3000, 96


def prepare(asked: Given) -> None:
    """Make the shards and the kernels at the same time."""
    told, began = asked.told("prepare"), time.monotonic()
    table = told.table("Seconds", "what", "until it was done")

    def note(what: str) -> None:
        table.rows.append([what, f"{time.monotonic() - began:.0f}"])
        told.save()

    def compile_loops() -> None:
        with Processes(asked.work) as processes:
            processes.run([processes.start("warm", dataserver("warm"))], print)
        note("kernels compiled")

    with ThreadPoolExecutor(1) as beside:
        compiled = beside.submit(compile_loops)
        samples = SMALL_SAMPLES if asked.small else SAMPLES
        make_shards(asked.work, samples, 1 if asked.small else max(1, (os.cpu_count() or 1) - 2))
        told.data["shards"] = samples
        note(f"{samples} pairs in indexed shards")
        compiled.result()


if __name__ == "__main__":
    prepare(given(__doc__))
