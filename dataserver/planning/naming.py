"""What things are called in messages and decisions."""

from dataserver.planning.jobspec import Stream
from dataserver.planning.samples import ROW_BITS, StepSamples


def sample_name(stream: Stream, samples: StepSamples, i: int) -> str:
    """Dataset, shard and row of a sample of a step."""
    shard, row = divmod(int(samples.sample[i]), 1 << ROW_BITS)
    return f"dataset {stream.datasets[int(samples.dataset[i])].name}, shard {shard}, row {row}"


def milliseconds(time_ns: int) -> str:
    """A time for people: "912.1 ms"."""
    tenths = (time_ns + 50_000) // 100_000
    return f"{tenths // 10:,}.{tenths % 10} ms"
