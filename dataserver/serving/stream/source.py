"""What one stream reads: one rank's views of a job, from the plan to encoded bytes. No threads, no memory."""

from dataclasses import dataclass
from typing import Final

from dataserver.assembly import (
    PreparedView,
    TensorSpec,
    UncountedError,
    UnreadableError,
    prepare_view,
    total_bytes,
    view_tensors,
)
from dataserver.jobs import IsCancelled
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import ViewPlan, view_plan
from dataserver.planning.stream.samples import ROW_BITS
from dataserver.serving.failures import FailureKind, Failures
from dataserver.serving.registry import ServedJob
from dataserver.serving.stream_memory import Buffer
from dataserver.serving.transport.interface import EncodedMicrobatch
from dataserver.serving.wire import encode_microbatch, zstd_compressor

NOT_MADE: Final = "from its stored bytes: damaged, of another size than was indexed, or beyond a limit"

NOT_COUNTED: Final = "its token ids are not there, or are not those that were counted: count tokens again"


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchSpec:
    """What a microbatch will hold, and where in its memory."""

    plan: StepPlan
    view: ViewPlan
    tensors: tuple[TensorSpec, ...]
    withheld: bool
    """Whether another rank gets the tensors, and this one the header alone."""

    @property
    def made(self) -> tuple[TensorSpec, ...]:
        """The tensors that are sent."""
        return () if self.withheld else self.tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors that are sent."""
        return total_bytes(self.made)


def following(spec: MicrobatchSpec) -> tuple[int, int]:
    """Step and microbatch behind this one."""
    step, after = spec.plan.step, spec.view.microbatch + 1
    return (step, after) if after < spec.plan.num_microbatches else (step + 1, 0)


@dataclass(frozen=True, slots=True)
class ViewSource:
    """Views of one (job, module, rank), restricted to some tensors."""

    served: ServedJob
    module: str
    rank: int
    tensors: tuple[str, ...]
    """Names of the tensors wanted, all if empty."""
    zstd_level: int | None
    """Compression level; None for raw tensors."""
    share_fetch: bool = False
    """Whether one rank of each sequence-parallel group gets the tensors for all."""

    @property
    def job_id(self) -> str:
        """Id of the job that the views belong to."""
        return self.served.job.job_id

    @property
    def num_steps(self) -> int:
        """Steps until the job ends."""
        return self.served.planner.num_steps

    def plan(self, step: int, cancelled: IsCancelled) -> StepPlan:
        """The plan of a step; WorkCancelledError if it is no longer wanted."""
        return self.served.planner.plan(step, cancelled)

    def specify(self, plan: StepPlan, microbatch: int) -> MicrobatchSpec:
        """What one microbatch will hold.

        Raises:
            UnknownTensorError: the view has no tensor of a name that is wanted.
        """
        spec = self.served.job.spec
        view = view_plan(spec, plan, self.module, self.rank, microbatch)
        tensors = view_tensors(spec, plan, view, self.tensors)
        reader = plan.groups.reader(self.module, self.rank, plan.step, microbatch)
        return MicrobatchSpec(plan, view, tensors, withheld=self.share_fetch and reader != self.rank)

    def prepare(self, wanted: MicrobatchSpec, buffer: Buffer) -> PreparedView:
        """Fill in everything but the images, which are left as tasks.

        Args:
            wanted: what to make.
            buffer: uint8 [wanted.num_bytes].
        """
        served = self.served
        prepared = prepare_view(
            served.job.spec, wanted.plan, wanted.view, served.datasets, wanted.made, buffer, served.installed
        )
        if prepared.tasks:
            served.planner.read_ahead(wanted.plan.step)
        return prepared

    def note_invalid(self, plan: StepPlan, prepared: PreparedView, failures: Failures) -> None:
        """Remember the samples of images that cannot be made from their stored bytes."""
        samples, (of, number) = plan.samples, plan.samples.locate(prepared.invalid)
        for sample, image in zip(of.tolist(), number.tolist(), strict=True):
            dataset, (shard, row) = int(samples.dataset[sample]), divmod(int(samples.sample[sample]), 1 << ROW_BITS)
            self._note(FailureKind.IMAGE, dataset, shard, row, f"image {image} cannot be made {NOT_MADE}", failures)

    def note_unreadable(self, error: UnreadableError | UncountedError, failures: Failures) -> None:
        """Remember a shard, or the token ids of a sample, that could not be read, without the place where it lies."""
        kind = FailureKind.READ if error.row < 0 else FailureKind.TEXT
        if isinstance(error, UncountedError):
            reason = NOT_COUNTED
        else:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__
            other = "it gave other bytes than its index promises" if error.row < 0 else NOT_COUNTED
            reason = (cause and cause.strerror) or other
        self._note(kind, error.dataset, error.shard, error.row, reason, failures)

    def _note(self, kind: FailureKind, dataset: int, shard: int, row: int, reason: str, failures: Failures) -> None:
        name = self.served.job.stream.datasets[dataset].name
        failures.note(kind, name, self.served.datasets[dataset], shard, row, reason)

    def encode(self, wanted: MicrobatchSpec, prepared: PreparedView, checksummed: bool) -> EncodedMicrobatch:
        """Encode a view whose tasks have all run; with a checksum if it is sent as bytes."""
        compressor = None if self.zstd_level is None else zstd_compressor(self.zstd_level)
        return encode_microbatch(
            self.served.job,
            wanted.plan,
            wanted.view,
            wanted.tensors,
            prepared.buffer,
            prepared.validity,
            compressor,
            checksummed=checksummed,
            withheld=wanted.withheld,
        )
