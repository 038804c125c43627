"""The stream as a Grain data set, for JAX: microbatches of one shape, numpy arrays, `get_state` and `set_state`.

    batches = iter(ServedDataset("data-0:50051", "job.yaml", rank=jax.process_index(), world_size=jax.process_count()))

An element is a microbatch (`padded.PaddedShape.pad` names its arrays); the optimizer's update belongs behind one with
`last_of_step`, and checkpoints behind that.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream
from trainclient.adapters.padded import PaddedShape
from trainclient.adapters.versions import require
from trainclient.stream.jobs import JobSource
from trainclient.stream.microbatch import Array

require("grain", "0.2.15", "0.3")
import grain  # noqa: E402


class ServedIterator(grain.DatasetIterator[dict[str, Array]]):
    """Iterates over the microbatches of one rank; for one thread at a time, in the process that made it."""

    def __init__(self, stream: FullModelStream) -> None:
        super().__init__()
        self.stream = stream
        self._shape = PaddedShape.of(stream)
        self._microbatches = _all_of(stream)

    def __next__(self) -> dict[str, Array]:
        """The next microbatch; StopIteration behind the job's last one, ValueError behind an error."""
        self._assert_not_closed()
        with self._stats.record_self_time():  # in Grain's summaries of what a pipeline waits for
            try:
                return self._shape.pad(next(self._microbatches))
            except StopIteration:
                self.stream.require_ended()
                raise

    def get_state(self) -> dict[str, Any]:
        """The stream's, plain values; the same on all ranks. Taken in mid-step, it begins with the whole step."""
        return self.stream.state_dict()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of any number of ranks; StateError if it is of another stream."""
        self.stream.load_state_dict(state)
        self._microbatches = _all_of(self.stream)

    def close(self) -> None:
        """End the stream that the batches come from."""
        super().close()
        self.stream.close()


class ServedDataset(grain.IterDataset[dict[str, Array]]):
    """The microbatches of one rank; each iterator opens a stream of its own."""

    def __init__(
        self, addresses: str | Sequence[str], job: JobSource, *, rank: int, world_size: int, **options: Any
    ) -> None:
        super().__init__()
        self._arguments = addresses, job
        self._options = {"rank": rank, "world_size": world_size, **options}

    def __iter__(self) -> ServedIterator:
        return ServedIterator(FullModelStream(*self._arguments, **self._options))

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:  # noqa: ARG002
        """Grain shares a data set out to processes by this; refused with ValueError."""
        raise ValueError(
            f"Grain would share the stream out once more ({sl}), though this rank has its own already and reads ahead "
            "by itself: leave mp_prefetch out, or prefetch with threads"
        )


def _all_of(stream: FullModelStream) -> Iterator[FullModelMicrobatch]:
    return chain.from_iterable(step.microbatches for step in stream)
