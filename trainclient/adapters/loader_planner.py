"""The planner as a library, for people who keep their own data and their own loader: sizes in, batches out.

    sizes = SampleSizes.of((len(ids), [image.size for image in images]) for ids, images in dataset)
    planner = LoaderPlanner(sizes, "job.yaml")
    loader = DataLoader(dataset, batch_sampler=PlannedBatches(planner, rank, world_size), collate_fn=...)

There is no server: every rank plans for itself, all to the same plans. Needs numba (the extra `server`).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Self

import numpy as np

from dataserver.planning import I64
from dataserver.planning.job.fields import SPECIAL_TOKENS, absent_fields
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.job.limits import check_contents, limits_of
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.gathering import Window, gather_step, gather_window, size_rows
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.samples import ROW_BITS, ShardTable
from dataserver.planning.stream.windows import Span, units_of
from trainclient.adapters.full_model import require_rank
from trainclient.stream.errors import StateError
from trainclient.stream.jobs import JobSource, load_job_data

SHARD_SAMPLES: Final = 1 << 16
"""Samples that are shuffled as one: `stream.shuffle_window` times as many are mixed."""
STATE_VERSION: Final = 1
SHARED_OUT: Final = (
    "the loader's samples are planned for this rank alone, and would be shared out to ranks once more: leave the "
    "loader out of accelerate's prepare()"
)
_TOKENIZER: Final = {
    "name": "own", "digest": hashlib.sha256(b"").hexdigest(), "vocab_size": 6,
    **{token: number for number, token in enumerate(SPECIAL_TOKENS)},
}  # fmt: skip
"""Counts are all that is known of the tokens; a job needs the rest."""
NO_LENGTH: Final = (
    "how many microbatches there are is known step by step, since steps have unequal numbers of them: count the steps "
    "(planner.num_steps), or planner.plan(step).num_microbatches of each"
)


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """What the planner has to know of the n samples of a data set, with their m images."""

    text_tokens: I64
    """int64 [n]: tokens of each sample's text."""
    image_offsets: I64
    """int64 [n + 1]: first image of each sample."""
    image_width: I64
    """int64 [m]: width of each image in pixels."""
    image_height: I64
    """int64 [m]: height of each image in pixels."""

    def __post_init__(self) -> None:
        ends = len(self.text_tokens) + 1, len(self.image_width)
        offsets = np.asarray(self.image_offsets)
        if (
            (len(offsets), len(self.image_height)) != ends
            or offsets[0] != 0
            or offsets[-1] != ends[1]
            or (np.diff(offsets) < 0).any()
        ):
            raise ValueError(
                f"found {len(self.text_tokens)} samples, {len(offsets)} offsets from {offsets[:1]} to {offsets[-1:]}, "
                f"{len(self.image_width)} widths and {len(self.image_height)} heights; offsets begin at 0, never fall, "
                "and end at the number of images, one more than samples"
            )
        if (self.text_tokens < 0).any() or (self.image_width < 1).any() or (self.image_height < 1).any():
            raise ValueError("found negative numbers of tokens, or images without pixels; leave such samples out")

    @classmethod
    def of(cls, samples: Iterable[tuple[int, Sequence[tuple[int, int]]]]) -> Self:
        """Make sizes from (tokens of the text, (width, height) of each image) of every sample."""
        tokens, sizes = list[int](), list[Sequence[tuple[int, int]]]()
        for text, images in samples:
            tokens.append(text)
            sizes.append(images)
        pixels = np.array(list(chain.from_iterable(sizes)), np.int64).reshape(-1, 2)
        offsets = np.cumsum([0, *map(len, sizes)], dtype=np.int64)
        return cls(np.array(tokens, np.int64), offsets, pixels[:, 0].copy(), pixels[:, 1].copy())

    @property
    def digest(self) -> str:
        """SHA-256 of all sizes: data of other sizes are another stream."""
        found = hashlib.sha256()
        for array in (self.text_tokens, self.image_offsets, self.image_width, self.image_height):
            found.update(np.ascontiguousarray(array, "<i8").tobytes())
        return found.hexdigest()


class LoaderPlanner:
    """Plans the steps of one job over one data set. Not thread-safe."""

    def __init__(self, sizes: SampleSizes, job: JobSource) -> None:
        """Lay out the order of the samples.

        Args:
            sizes: of the data set.
            job: as for servers, with one dataset; what servers would fill in follows from the sizes.

        Raises:
            ValueError: the job is not valid, or a sample does not fit; names it.
        """
        self.job = _filled(load_job_data(job), sizes)
        spec = self.job.spec
        if [dataset.fingerprint for dataset in spec.stream.datasets] != [sizes.digest]:
            raise ValueError(
                f"the job was completed for data of other sizes than these {len(sizes.text_tokens)} samples: hand all "
                "ranks the same data, or leave stream.datasets[0].fingerprint out"
            )
        if spec.stream.continues is not None:
            raise ValueError(
                "the job continues another stream, which only data servers can; leave stream.continues out"
            )
        if spec.stream.datasets[0].documents is not None or any(spec.stream.packing.budget):
            raise ValueError(
                "the job splits documents, or gives sequences a budget of images, clips or videos, and sizes do not "
                "say in which order the parts of a sample come: leave stream.datasets[0].documents and the max_* of "
                "stream.packing out, or read from data servers"
            )
        limits = layout_of(spec.execution).limits(spec)
        self._tables = list(_tables(self.job, sizes))
        for number, table in enumerate(self._tables):
            limits.add(0, table, _where(number))
        lengths = np.array([units_of(spec.stream, table).sum() for table in self._tables], np.int64)
        self._order = StreamOrder(spec.stream, spec.execution.end, [lengths])
        counts = (len(sizes.text_tokens), len(sizes.image_width))
        check_contents(spec, *(self._order.in_step([count]) for count in counts))
        limits.check(self._order.repeats(spec.stream.contrastive_batch or 1))
        self._most = limits_of(spec.execution)
        self._windows = dict[tuple[int, int], Window]()
        self._last: StepPlan | None = None

    @property
    def num_steps(self) -> int:
        """Steps until the job ends."""
        return self._order.num_steps

    def plan(self, step: int) -> StepPlan:
        """The plan of a step; StepOutOfRangeError if the job ends before."""
        if self._last is None or self._last.step != step:
            stream = self.job.spec.stream
            self._last = plan_step(self.job, step, gather_step(stream, self._order, step, self._windows_of, self._most))
        return self._last

    def batches(self, step: int, rank: int) -> list[list[int]]:
        """The samples of each microbatch of a backbone rank in their order, as positions in the data set.

        All ranks have the same number of microbatches; another step may have more. Samples of one sequence follow each
        other.
        """
        plan = self.plan(step)
        backbone = plan.arrangement(self.job.spec.execution.backbone.name)
        found = []
        for microbatch in range(plan.num_microbatches):
            number = plan.samples.sample[backbone.item[backbone.of(rank, microbatch)]].astype(np.int64)
            found.append(((number >> ROW_BITS) * SHARD_SAMPLES + (number & ((1 << ROW_BITS) - 1))).tolist())
        return found

    def lacks_images(self, step: int, rank: int, microbatch: int) -> bool:
        """Whether other ranks have images in this microbatch and this one has none, in a job with modality parity whose
        step left no other way. A sharded encoder then must run on something here as well."""
        spec = self.job.spec
        view = view_plan(spec, self.plan(step), spec.execution.backbone.name, rank, microbatch)
        return view.images_on_some_ranks and not any(len(routing.rows) for routing in view.routings)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a checkpoint needs to begin with a step, the same on every rank."""
        return {"version": STATE_VERSION, "stream_id": self.job.stream_id, "step": step}

    def step_of(self, state: Mapping[str, Any]) -> int:
        """The step that a state begins with, whatever number of ranks it was taken with.

        Raises:
            StateError: it is of another version or another stream, or lies beyond the end of the job.
        """
        wanted = {"version": STATE_VERSION, "stream_id": self.job.stream_id}
        for field, value in wanted.items():
            if state.get(field) != value:
                raise StateError(
                    f"the state has {field} {state.get(field)!r}, this job {value!r}: resume with the same data, "
                    "stream and release, or start without the checkpoint"
                )
        step = state.get("step")
        if not isinstance(step, int) or not 0 <= step <= self.num_steps:
            raise StateError(
                f"the state begins with step {step!r}; this job has 0 to {self.num_steps}: begin with one of them, or "
                "raise execution.end"
            )
        return step

    def _windows_of(self, span: Span) -> tuple[Window]:
        """The window of a span; the last two are kept, since a step may begin in one and end in the next."""
        key = span.epoch, span.number
        if key not in self._windows:
            window = gather_window(self._order, span, [self._tables[shard] for shard in span.shards])
            self._windows = dict([*self._windows.items(), (key, window)][-2:])
        return (self._windows[key],)


class PlannedBatches:
    """Batch sampler of one rank: the positions in the data set of one microbatch after the other."""

    def __init__(self, planner: LoaderPlanner, rank: int, world_size: int, start_step: int = 0) -> None:
        """Sample for a backbone rank, one of so many that train.

        Raises:
            ValueError: the job has other ranks.
        """
        require_rank(planner.job.spec.execution.backbone, rank, world_size)
        self.planner = planner
        self.rank = rank
        self.start_step = start_step

    def __iter__(self) -> Iterator[list[int]]:
        """From `start_step` to the end of the job. A loader may ask ahead of what it hands out."""
        for step in range(self.start_step, self.planner.num_steps):
            yield from self.planner.batches(step, self.rank)

    def __len__(self) -> int:
        """Asked for by `len(loader)`; refused with TypeError, which torch and progress bars take for no length."""
        raise TypeError(NO_LENGTH)

    def __bool__(self) -> bool:
        return True

    @property
    def sampler(self) -> Any:
        """Asked for by accelerate's prepare(), which would share batches out once more; refused with ValueError."""
        raise ValueError(SHARED_OUT)


class PlannedSamples:
    """Sampler of one rank, for loaders that make batches themselves: the same positions, one after the other.

    Batches of constant size are the plan's in a job without packing (`stream.packing.enabled: false`), if the loader's
    batch_size is `execution.microbatch`.
    """

    def __init__(self, planner: LoaderPlanner, rank: int, world_size: int, start_step: int = 0) -> None:
        self.batches = PlannedBatches(planner, rank, world_size, start_step)

    def __iter__(self) -> Iterator[int]:
        """From `start_step` to the end of the job."""
        return chain.from_iterable(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def __bool__(self) -> bool:
        return True

    @property
    def generator(self) -> Any:
        """Asked for by accelerate's prepare(), as `PlannedBatches.sampler`; refused with ValueError."""
        raise ValueError(SHARED_OUT)


def _filled(data: Job | dict[str, Any], sizes: SampleSizes) -> Job:
    """The job with what servers would fill in; a complete one as it is."""
    if isinstance(data, Job) or not absent_fields(data):
        return data if isinstance(data, Job) else parse_job(data)
    stream = dict(data["stream"])
    datasets = stream.get("datasets")
    if not isinstance(datasets, list) or len(datasets) != 1:
        raise ValueError(
            f"stream.datasets is {datasets!r}; a data set of one's own is one entry, such as [{{name: own}}]"
        )
    stream["datasets"] = [{"fingerprint": sizes.digest, "quarantine": "", **datasets[0]}]
    stream["tokenizer"] = {**_TOKENIZER, **stream.get("tokenizer", {})}
    return parse_job({**data, "stream": stream})


def _tables(job: Job, sizes: SampleSizes) -> Iterator[ShardTable]:
    """Sized tables of SHARD_SAMPLES samples each."""
    for number, first in enumerate(range(0, len(sizes.text_tokens), SHARD_SAMPLES)):
        texts = sizes.text_tokens[first : first + SHARD_SAMPLES]
        offsets = sizes.image_offsets[first : first + len(texts) + 1]
        images = slice(int(offsets[0]), int(offsets[-1]))
        columns = ShardColumns(
            text_offsets=np.arange(len(texts) + 1),
            text_tokens=texts,
            image_offsets=offsets - offsets[0],
            image_width=sizes.image_width[images].astype(np.int32),
            image_height=sizes.image_height[images].astype(np.int32),
        )
        yield size_rows(job.spec.stream, columns, np.arange(len(texts)), _where(number))


def _where(shard: int) -> str:
    return f"samples from {shard * SHARD_SAMPLES:,} on"
