"""What all jobs of a server cache together, bounded in bytes."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dataserver.dataset import LruCache
from dataserver.jobs.memory_usage import memory_of
from dataserver.jobs.single_flight import SingleFlightCache
from dataserver.jobs.statistics_cache import StatisticsCache
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.stream.gathering import Window
from dataserver.planning.stream.samples import ShardTable
from dataserver.planning.stream.slices import Slices

CACHE_BYTES: Final = 768 << 20
"""A third each for tables, windows and plans. A sample of one image takes some 40 bytes in a table, and 40 in a window:
the windows of 256 MiB are 6.7 million samples, or eighty times eight shards of 10,000."""
CUTS_BYTES: Final = 8 << 20
"""Where windows are cut into slices, besides: some 20,000 windows, or a hundred of as many slices as there may be."""


class JobCache:
    """Sized tables of shards, which jobs of one stream share, and plans of steps. Thread-safe."""

    def __init__(self, num_bytes: int = CACHE_BYTES, cache_dir: Path | None = None) -> None:
        """Make an empty cache.

        Args:
            num_bytes: how much memory is used at most, besides what is in use.
            cache_dir: where statistics of shards are cached on disk; nowhere by default.
        """
        self.statistics = StatisticsCache(cache_dir)
        third = num_bytes // 3
        self.tables = LruCache[ShardTable](third, memory_of)
        """By stream, dataset and shard."""
        self.window_bytes = third
        self.windows = LruCache[Window](third, memory_of)
        """By stream, dataset, epoch, the window's first shard, and slice. Keys are small: no budget counts them."""
        self.cuts = LruCache[Slices](CUTS_BYTES, memory_of)
        """By stream, dataset, epoch and the window's first shard: how each window is cut into slices, most into one."""
        self.plans = SingleFlightCache[tuple[str, int], StepPlan](num_bytes - 2 * third, memory_of)
        """Plans by job and step."""
        self.in_flight = SingleFlightCache[tuple[str, int], StepPlan](0, memory_of)
        """Plans that are being made here, by job and step. `plans` also has some that are being fetched, and a
        server that asks for one must not wait for what this one asks others for."""

    def forget_others(self, jobs: Iterable[Job]) -> None:
        """Drop what belongs to none of these jobs."""
        job_ids, stream_ids = set(), set()
        for job in jobs:
            job_ids.add(job.job_id)
            stream_ids.add(job.stream_id)
        for cache in (self.tables, self.windows, self.cuts):
            cache.drop_where(lambda key: key[0] not in stream_ids)
        for plans in (self.plans, self.in_flight):
            plans.drop(lambda key: key[0] not in job_ids)
