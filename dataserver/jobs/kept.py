"""What is kept of all jobs together, bounded in bytes."""

from collections.abc import Iterable
from typing import Final

from dataserver.dataset import LruCache
from dataserver.jobs.once import OnceCache
from dataserver.jobs.sizes import memory_of
from dataserver.planning.identity import Job
from dataserver.planning.plan import StepPlan
from dataserver.planning.samples import ShardTable

KEPT_BYTES: Final = 768 << 20
TABLES_SHARE: Final = 2 / 3
"""Of the bytes; the rest is for plans. A table takes 80 bytes a sample, so two thirds of 768 MiB hold six million."""


class Kept:
    """Sized tables of shards, which jobs of one stream share, and plans of steps. Thread-safe."""

    def __init__(self, num_bytes: int = KEPT_BYTES) -> None:
        """Keep nothing yet, and later at most so many bytes, besides what is in use."""
        tables = int(num_bytes * TABLES_SHARE)
        self.tables = LruCache[ShardTable](tables, memory_of)
        """By stream, dataset and shard. Two jobs that want one at once both make it: to wait would cost a turn."""
        self.plans = OnceCache[tuple[str, int], StepPlan](num_bytes - tables, memory_of)
        """By job and step."""

    def forget_others(self, jobs: Iterable[Job]) -> None:
        """Drop what belongs to none of these jobs."""
        job_ids, stream_ids = set(), set()
        for job in jobs:
            job_ids.add(job.job_id)
            stream_ids.add(job.stream_id)
        self.tables.drop_where(lambda key: key[0] not in stream_ids)
        self.plans.drop(lambda key: key[0] not in job_ids)
