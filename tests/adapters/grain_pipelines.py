"""The stream among Grain's own transformations: grain_pipelines.py SERVER."""

import sys

import grain
import pytest
from absl import flags
from adapters.whole_jobs import whole_job
from grain._src.python.dataset.dataset import get_execution_summary

from trainclient.adapters.grain import ServedDataset

TIMED = grain.experimental.DatasetOptions(execution_tracking_mode=grain.experimental.ExecutionTrackingMode.STAGE_TIMING)


def main(server: str) -> None:
    dataset = ServedDataset(server, whole_job(1, {"steps": 2}), rank=0, world_size=1)
    expected = [batch["token_ids"].sum() for batch in dataset]
    sums = grain.experimental.WithOptionsIterDataset(dataset, TIMED).map(lambda batch: batch["token_ids"].sum())
    batches = iter(grain.experimental.ThreadPrefetchIterDataset(sums, prefetch_buffer_size=2))
    assert list(batches) == expected
    batches._stats.report()  # as a thread of Grain's does now and then
    (node,) = [node for node in get_execution_summary(batches).nodes.values() if "Served" in node.name]
    assert node.num_produced_elements >= len(expected)
    assert node.total_processing_time_ns > 0, "what it waits for is told"
    flags.FLAGS.mark_as_parsed()
    with pytest.raises(ValueError, match=r"share the stream out once more .*leave mp_prefetch out"):
        list(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2)))


if __name__ == "__main__":
    main(sys.argv[1])
