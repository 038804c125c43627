"""What things are called in messages and decisions."""

from dataserver.planning import I64
from dataserver.planning.job.fields import ModuleSpec, Stream
from dataserver.planning.stream.samples import ROW_BITS, StepSamples


def sample_name(stream: Stream, samples: StepSamples, i: int) -> str:
    """Dataset, shard and row of a sample of a step, and its part of a document that is split."""
    shard, row = divmod(int(samples.sample[i]), 1 << ROW_BITS)
    found = f"dataset {stream.datasets[int(samples.dataset[i])].name}, shard {shard}, row {row}"
    if samples.parts is None or samples.parts[i, 1] == 1:
        return found
    return f"{found}, part {samples.parts[i, 0]} of {samples.parts[i, 1]}"


def short_name(stream: Stream, dataset: int, sample: int) -> str:
    """The same in a list, of the dataset at a position of the job's list and a sample's number."""
    shard, row = divmod(sample, 1 << ROW_BITS)
    return f"{stream.datasets[dataset].name} shard {shard} row {row}"


def unit_of(module: ModuleSpec) -> str:
    """What a module's items are sized in."""
    return "tokens" if module.holds_samples else "patches"


def listed(numbers: I64) -> str:
    """Numbers for people: "5, 4, 3"; of more than eight the first and the last."""
    found = numbers.tolist()
    return ", ".join(map(str, found)) if len(found) <= 8 else f"{found[0]} to {found[-1]}"


def counted(number: int, thing: str, several: str = "") -> str:
    """A number of things: "1 rank", "2,048 ranks"; `several` are those whose plural has another ending."""
    return f"{number:,} {thing if number == 1 else several or thing + 's'}"


def milliseconds(time_ns: int) -> str:
    """A time for people: "912.1 ms"."""
    tenths = (time_ns + 50_000) // 100_000
    return f"{tenths // 10:,}.{tenths % 10} ms"
