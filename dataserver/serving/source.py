"""What one stream reads: one rank's views of a job, from the plan to encoded bytes. No threads, no memory."""

from dataclasses import dataclass

from dataserver.planning.plan import StepPlan
from dataserver.planning.views import ViewPlan, view_plan
from dataserver.preprocessing import PreparedView, TensorSpec, prepare_view, total_bytes, view_tensors
from dataserver.serving.memory import Buffer
from dataserver.serving.registry import ServedJob
from dataserver.serving.wire import EncodedMicrobatch, encode_microbatch, zstd_compressor


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes and places of what a microbatch will hold."""

    plan: StepPlan
    view: ViewPlan
    tensors: tuple[TensorSpec, ...]
    num_bytes: int


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

    @property
    def num_steps(self) -> int:
        """Steps until the job ends."""
        return self.served.planner.num_steps

    def plan(self, step: int) -> StepPlan:
        """The plan of a step."""
        return self.served.planner.plan(step)

    def lay_out(self, plan: StepPlan, microbatch: int) -> Layout:
        """The layout of one microbatch.

        Raises:
            UnknownTensorError: the view has no tensor of a name that is wanted.
        """
        spec = self.served.job.spec
        view = view_plan(spec, plan, self.module, self.rank, microbatch)
        tensors = view_tensors(spec, plan, view, self.tensors)
        return Layout(plan, view, tensors, total_bytes(tensors))

    def prepare(self, layout: Layout, buffer: Buffer) -> PreparedView:
        """Fill in everything but the images, which are left as tasks.

        Args:
            layout: what to make.
            buffer: uint8 [layout.num_bytes].
        """
        served = self.served
        return prepare_view(
            served.job.spec, layout.plan, layout.view, served.datasets, served.tokenizer, self.tensors, buffer
        )

    def encode(self, layout: Layout, prepared: PreparedView) -> EncodedMicrobatch:
        """Encode a view whose tasks have all run."""
        compressor = None if self.zstd_level is None else zstd_compressor(self.zstd_level)
        return encode_microbatch(
            self.served.job, layout.plan, layout.view, layout.tensors, prepared.buffer, prepared.validity, compressor
        )
