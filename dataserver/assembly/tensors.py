"""Where the tensors of a view lie in its buffer. Computed from the plan alone."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly.sequences import understood_images
from dataserver.images import U8
from dataserver.planning import I64
from dataserver.planning.job.fields import AudioSizing, Modality, ModuleKind, Sizing, served_frames
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import ViewPlan, aligned
from dataserver.planning.stream.item_sizes import audio_sizing, item_tokens, video_sizing
from dataserver.planning.stream.samples import StepSamples, Task
from dataserver.planning.stream.tiles import LAYOUT

_U8: Final = np.dtype("u1")
_I32: Final = np.dtype("<i4")
_F32: Final = np.dtype("<f4")

_ASKED_FOR: Final = frozenset({"rotary_positions"})
"""Tensors that only requests get which name them."""

_DType = np.dtype[np.uint8] | np.dtype[np.int32] | np.dtype[np.float32]


class UnknownTensorError(ValueError):
    """A request names a tensor that the view does not have."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a view."""

    name: str
    dtype: _DType
    shape: tuple[int, ...]
    offset: int
    """First byte in the buffer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return prod(self.shape) * self.dtype.itemsize

    def of(self, buffer: U8) -> NDArray[np.uint8] | NDArray[np.int32] | NDArray[np.float32]:
        """The tensor within a buffer."""
        return buffer[self.offset : self.offset + self.num_bytes].view(self.dtype).reshape(self.shape)


def view_tensors(spec: JobSpec, plan: StepPlan, view: ViewPlan, names: Collection[str] = ()) -> tuple[TensorSpec, ...]:
    """The tensors of a view and their places in one buffer, in the order in which `microbatch.proto` describes them.

    Args:
        spec: the job.
        plan: the step.
        view: the view.
        names: the tensors that are wanted; if empty, all but those that must be asked for.

    Raises:
        UnknownTensorError: the view has no tensor of that name.
    """
    shapes = _shapes(spec, plan, view)
    unknown = sorted(set(names) - {name for name, _, _ in shapes})
    if unknown:
        raise UnknownTensorError(
            f"the view of module {view.module} ({view.kind}) has no tensor {', '.join(unknown)}; "
            f"it has {', '.join(name for name, _, _ in shapes)}"
        )
    tensors = []
    offset = 0
    for name, dtype, shape in shapes:
        if name in names or (not names and name not in _ASKED_FOR):
            tensors.append(TensorSpec(name, dtype, shape, offset))
            offset = aligned(offset + tensors[-1].num_bytes)
    return tuple(tensors)


def total_bytes(tensors: Sequence[TensorSpec]) -> int:
    """Bytes of a buffer that holds the tensors; nothing follows the last one."""
    return tensors[-1].offset + tensors[-1].num_bytes if tensors else 0


_Shapes = list[tuple[str, _DType, tuple[int, ...]]]


def _shapes(spec: JobSpec, plan: StepPlan, view: ViewPlan) -> _Shapes:
    """All tensors of a view."""
    if view.kind is ModuleKind.BACKBONE:
        return _backbone_shapes(spec, plan, view)
    if view.holds_samples:
        return _text_shapes(plan, view)
    return _audio_shapes(spec, plan, view) if view.reads is Modality.AUDIO else _image_shapes(spec, plan, view)


def _text_shapes(plan: StepPlan, view: ViewPlan) -> _Shapes:
    num_tokens = int(plan.samples.tokens[view.items].sum())
    return [
        ("token_ids", _I32, (num_tokens,)),
        ("position_ids", _I32, (num_tokens,)),
        ("cu_lengths", _I32, (view.num_items + 1,)),
    ]


def _backbone_shapes(spec: JobSpec, plan: StepPlan, view: ViewPlan) -> _Shapes:
    samples = plan.samples
    generated = int((samples.task[view.items] == Task.GENERATION).sum())
    num_tokens = int(samples.tokens[view.items].sum())
    num_embeddings = int(item_tokens(samples, spec.stream.sizing)[understood_images(samples, view.items)].sum())
    num_conditions = generated * spec.stream.generation.query_tokens
    return [
        ("token_ids", _I32, (num_tokens,)),
        ("labels", _I32, (num_tokens,)),
        ("position_ids", _I32, (num_tokens,)),
        ("cu_lengths", _I32, (view.num_items + 1,)),
        ("cu_sequences", _I32, (plan.sequences_per_microbatch + 1,)),
        ("embedding_slots", _I32, (num_embeddings,)),
        ("condition_slots", _I32, (num_conditions,)),
    ] + ([("rotary_positions", _I32, (3, num_tokens))] if spec.stream.sizing.tiles is None else [])


def _image_shapes(spec: JobSpec, plan: StepPlan, view: ViewPlan) -> _Shapes:
    total = int(num_patches(plan.samples, view.items).sum())
    is_video = view.reads is Modality.VIDEO
    frames = video_sizing(spec.stream.sizing).temporal_patch if is_video else 1
    if spec.stream.sizing.tiles is not None and not is_video:
        return _tiled_shapes(spec.stream.sizing, plan.samples, view, total)
    shapes: _Shapes = [
        ("patches", _U8, (total, frames * spec.stream.sizing.patch**2 * 3)),
        ("grid", _I32, (view.num_items, 3 if is_video else 2)),
        ("cu_patches", _I32, (view.num_items + 1,)),
    ]
    if view.kind is ModuleKind.GENERATOR:
        shapes += [("loss_mask", _U8, (view.num_items,)), ("condition_offsets", _I32, (view.num_items + 1,))]
    return shapes


def _tiled_shapes(sizing: Sizing, samples: StepSamples, view: ViewPlan, total: int) -> _Shapes:
    """Shapes of images that are cut into tiles: a grid for each part."""
    num_parts = int((samples.image_rows[view.items] // samples.image_columns[view.items]).sum())
    return [
        ("patches", _U8, (total, sizing.patch**2 * 3)),
        ("grid", _I32, (num_parts, 2)),
        ("cu_patches", _I32, (num_parts + 1,)),
        ("tiles", _I32, (view.num_items, LAYOUT)),
        ("cu_rows", _I32, (view.num_items + 1,)),
    ]


def _audio_shapes(spec: JobSpec, plan: StepPlan, view: ViewPlan) -> _Shapes:
    audio = audio_sizing(spec.stream.sizing)
    frames = clip_ends(audio, plan.samples, view.items)
    return [
        ("mel", _F32, (int(frames[-1]), audio.bins)),
        ("cu_frames", _I32, (view.num_items + 1,)),
        ("cu_positions", _I32, (view.num_items + 1,)),
        ("cu_rows", _I32, (view.num_items + 1,)),
    ]


def clip_ends(sizing: AudioSizing, samples: StepSamples, clips: I64) -> I64:
    """int64 [k + 1]: first frame of each clip's spectrogram in a view, and the total."""
    frames = [served_frames(positions, sizing) for positions in samples.image_columns[clips].tolist()]
    return np.cumsum([0, *frames])


def num_patches(samples: StepSamples, images: I64) -> I64:
    """int64 [k]: patches of images of a step, given by their indices, int64 [k]."""
    return samples.image_rows[images].astype(np.int64) * samples.image_columns[images]
