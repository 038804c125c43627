"""The tensors of a view: their places in one buffer, and the tasks that fill it.

A view is laid out from the plan alone. `prepare_view` fills what needs no pixels and returns tasks of a few images; the
caller runs them on its thread pool, in any order, and then calls `finish`. The bytes depend on the job and the stored
data alone, whatever the buffer held before.

A view of samples needs no pixels, and waits for none: whether its images can be decoded is not known then. A job whose
`execution.validity` is exact pays for knowing it, with tasks that decode images and keep the verdict alone.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly.decoders import Item
from dataserver.assembly.decoding import IMAGES_PER_TASK, DecodeTask, Decoding, UnreadableError
from dataserver.assembly.image_runs import images_of
from dataserver.assembly.image_transforms import draw_transforms
from dataserver.assembly.sequences import IGNORED, backbone_arrays, backbone_rotary_positions, text_arrays
from dataserver.assembly.tensors import TensorSpec, clip_ends, num_patches, total_bytes
from dataserver.dataset import (
    Dataset,
    ShardReadError,
    TokenizedDocument,
    TokensMissingError,
    texts_key,
)
from dataserver.images import U8
from dataserver.planning import I32, I64, Bool
from dataserver.planning.job.fields import Modality, ModuleKind, Sizing
from dataserver.planning.job.spec import JobSpec, ValidityPolicy
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.views import ViewPlan
from dataserver.planning.stream.captions import captions_of
from dataserver.planning.stream.item_sizes import VideoLengths, audio_sizing, item_tokens, video_sizing
from dataserver.planning.stream.samples import ROW_BITS, VIDEO, StepSamples, sums_before
from dataserver.transforms import NO_TRANSFORMS, Pixels


class UncountedError(TokensMissingError):
    """The token ids of a shard are not there, or are not those that were counted; found at one sample."""

    def __init__(self, said: str, dataset: int, shard: int, row: int) -> None:
        super().__init__(said)
        self.dataset, self.shard, self.row = dataset, shard, row


class Validity(IntEnum):
    """What is known of an item, in the numbers of the proto."""

    UNKNOWN = 1
    """A sample with images that nobody decoded for this view."""
    VALID = 2
    INVALID = 3
    """An image that cannot be made from its stored bytes, or a sample with such an image."""


@dataclass(frozen=True, slots=True, eq=False)
class _Images:
    """The images that are decoded for a view: k of them, of n items."""

    index: I64
    """int64 [k]: indices into the step's images."""
    item: I64
    """int64 [k]: the item of the view that each belongs to."""
    valid: Bool
    """bool [k]: what its task found."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedView:
    """A view that is complete when all `tasks` have run and `finish` was called."""

    tensors: tuple[TensorSpec, ...]
    buffer: U8
    """uint8 [total_bytes(tensors)]: all tensors, one behind the other."""
    validity: U8
    """uint8 [items], numbers of `Validity`; complete after `finish`."""
    tasks: tuple[DecodeTask, ...]
    """Each decodes some images, independent of the others and repeatable, and returns the encoded bytes that it read.
    UnreadableError where storage fails, TransformUnavailableError where a transform of a user does not end."""
    images: _Images
    tokens: I64
    """int64 [items]: tokens of each sample; meaningless where items are images."""

    @property
    def num_images(self) -> int:
        """Images that the tasks decode."""
        return len(self.images.valid)

    @property
    def num_invalid(self) -> int:
        """Images among them that cannot be made from their stored bytes; every task has run."""
        return self.num_images - int(np.count_nonzero(self.images.valid))

    @property
    def invalid(self) -> I64:
        """int64 [num_invalid]: these, as indices into the step's images."""
        return self.images.index[~self.images.valid]

    def finish(self) -> None:
        """Fill what depends on the validity of the images; every task has run."""
        self.validity[self.images.item] = Validity.VALID
        self.validity[self.images.item[~self.images.valid]] = Validity.INVALID
        for tensor in self.tensors:
            if tensor.name == "loss_mask":
                tensor.of(self.buffer)[:] = self.validity == Validity.VALID
            elif tensor.name == "labels":
                tensor.of(self.buffer)[np.repeat(self.validity == Validity.INVALID, self.tokens)] = IGNORED


def prepare_view(
    spec: JobSpec,
    plan: StepPlan,
    view: ViewPlan,
    datasets: Sequence[Dataset],
    tensors: tuple[TensorSpec, ...],
    buffer: U8,
    installed: Pixels = NO_TRANSFORMS.pixels,
) -> PreparedView:
    """Fill tokens and offsets of a view, and make the tasks that fill its pixels.

    Args:
        spec: the job.
        plan: the step.
        view: the view.
        datasets: the datasets of the job, in its order.
        tensors: those of the view that are wanted (`view_tensors`); without any, the validity of its items alone.
        buffer: writable uint8 [total_bytes(tensors)]; its content does not matter.
        installed: applies the transforms of pixels that users installed.

    Raises:
        TokenCountError: a text does not have the tokens that were planned.
        UncountedError: the token ids of a shard are not there, or are not those that were counted.
        UnreadableError: storage did not give the token ids of a sample.
        ShardReadError: storage failed.
        ValueError: the buffer has another size.
    """
    if buffer.shape != (total_bytes(tensors),) or buffer.dtype != np.uint8 or not buffer.flags.c_contiguous:
        raise ValueError(
            f"found a buffer of {buffer.dtype} {list(buffer.shape)}; "
            f"contiguous uint8 [{total_bytes(tensors)}] is required"
        )
    _clear_gaps(tensors, buffer)
    by_name = {tensor.name: tensor.of(buffer) for tensor in tensors}
    arrays: dict[str, I32] | dict[str, I32 | I64]
    if view.holds_samples:
        lengths = _video_lengths(spec, plan.samples, view, datasets, by_name)
        arrays = _sequences(spec, plan, view, datasets, lengths) if tensors else {}
        if "rotary_positions" in by_name:
            arrays["rotary_positions"] = backbone_rotary_positions(
                spec.stream, plan.samples, view.items, arrays, lengths
            )
        counts = np.diff(plan.samples.image_offsets)[view.items]
    else:
        arrays = _offsets(spec, plan, view)
        counts = np.ones(view.num_items, np.int64)
    for name, array in arrays.items():
        if name in by_name:
            by_name[name][...] = array
    images = _images_to_decode(spec, plan.samples, view, counts)
    return PreparedView(
        tensors=tensors,
        buffer=buffer,
        validity=np.where(counts > 0, Validity.UNKNOWN, Validity.VALID).astype(np.uint8),
        tasks=tuple(
            _image_tasks(spec, plan.samples, images, datasets, by_name.get("mel", by_name.get("patches")), installed)
        ),
        images=images,
        tokens=plan.samples.tokens[view.items] if view.holds_samples else counts,
    )


def _images_to_decode(spec: JobSpec, samples: StepSamples, view: ViewPlan, counts: I64) -> _Images:
    """All of a view of images; of a view of samples, which have `counts` images, all or none as the job wants it."""
    if not view.holds_samples:
        index = view.items
    elif spec.execution.validity is ValidityPolicy.EXACT:
        first = np.repeat(samples.image_offsets[view.items] - (np.cumsum(counts) - counts), counts)
        index = first + np.arange(len(first))
    else:
        index, counts = np.zeros(0, np.int64), np.zeros_like(counts)
    return _Images(index, np.repeat(np.arange(view.num_items), counts), np.zeros(len(index), np.bool_))


def _clear_gaps(tensors: Sequence[TensorSpec], buffer: U8) -> None:
    """Zero the bytes between tensors, where a recycled buffer holds old data."""
    ends = [tensor.offset + tensor.num_bytes for tensor in tensors]
    for end, after in zip(ends, tensors[1:], strict=False):
        buffer[end : after.offset] = 0


def _sequences(
    spec: JobSpec, plan: StepPlan, view: ViewPlan, datasets: Sequence[Dataset], lengths: VideoLengths | None
) -> dict[str, I32]:
    documents = _documents(spec, plan.samples, view.items, datasets)
    if view.kind is ModuleKind.BACKBONE:
        return backbone_arrays(spec.stream, plan, view, documents, lengths)
    return text_arrays(spec.stream, plan, view, documents)


def _documents(spec: JobSpec, of: StepSamples, items: I64, datasets: Sequence[Dataset]) -> Iterator[TokenizedDocument]:
    """Yield the whole document of each of some samples, one after the other: none is kept but the last one, so that
    parts of one that follow each other read it once, and a view of parts never has all their documents in memory."""
    digest, last, found = spec.stream.tokenizer.digest, None, None
    captions = captions_of(spec.stream, of.dataset[items], of.epoch[items], of.sample[items])
    for i, caption in zip(items.tolist(), captions, strict=True):
        where = int(of.dataset[i]), *divmod(int(of.sample[i]), 1 << ROW_BITS)
        key = where, caption
        try:
            if found is None or key != last:
                found = datasets[where[0]].document(*where[1:], texts_key(digest, caption))
        except TokensMissingError as error:
            raise UncountedError(str(error), *where) from error
        except (ShardReadError, OSError) as error:
            raise UnreadableError(str(error), *where) from error
        last = key
        yield found


def _video_lengths(
    spec: JobSpec, samples: StepSamples, view: ViewPlan, datasets: Sequence[Dataset], tensors: Container[str]
) -> VideoLengths | None:
    """What the index says of the videos of a view of samples, where tokens or positions that are wanted depend on it;
    of `images_of` these samples."""
    sizing = video_sizing(spec.stream.sizing)
    has_rate = sizing.positions_per_second is not None and "rotary_positions" in tensors
    if samples.image_modality is None or not (has_rate or sizing.timestamps is not None):
        return None
    index = images_of(samples, view.items)
    lengths = VideoLengths(np.zeros(len(index), np.int32), np.zeros(len(index), np.int64))
    for n in np.flatnonzero(samples.image_modality[index] == VIDEO).tolist():
        of, number = (int(found[0]) for found in samples.locate(index[n : n + 1]))
        shard, row = divmod(int(samples.sample[of]), 1 << ROW_BITS)
        ref = datasets[int(samples.dataset[of])].shards[shard].image(row, number)
        lengths.frames[n], lengths.microseconds[n] = ref.frames, ref.microseconds
    return lengths


def _offsets(spec: JobSpec, plan: StepPlan, view: ViewPlan) -> dict[str, I32 | I64]:
    """Return what a view holds beside the pixels of its images or videos, or the spectrograms of its clips."""
    samples = plan.samples
    if view.reads is Modality.AUDIO:
        return {
            "cu_frames": clip_ends(audio_sizing(spec.stream.sizing), samples, view.items),
            "cu_positions": sums_before(samples.image_columns[view.items]),
            "cu_rows": sums_before(item_tokens(samples, spec.stream.sizing)[view.items]),
        }
    if samples.image_layout is not None and view.reads is Modality.IMAGE:
        return _tiled_offsets(spec.stream.sizing, samples, samples.image_layout, view.items)
    return {
        "grid": _grid(samples, view),
        "cu_patches": sums_before(num_patches(samples, view.items)),
        "loss_mask": np.zeros(view.num_items, np.int32),
        "condition_offsets": np.arange(view.num_items + 1) * spec.stream.generation.query_tokens,
    }


def _tiled_offsets(sizing: Sizing, samples: StepSamples, layouts: I32, items: I64) -> dict[str, I32 | I64]:
    """What a view of images that are cut into tiles holds beside pixels."""
    cells = samples.image_columns[items]
    parts = samples.image_rows[items] // cells
    sides = np.repeat(cells, parts)
    return {
        "grid": np.stack([sides, sides], axis=1),
        "cu_patches": sums_before(sides.astype(np.int64) ** 2),
        "tiles": layouts[items],
        "cu_rows": sums_before(item_tokens(samples, sizing)[items]),
    }


def _grid(samples: StepSamples, view: ViewPlan) -> I32:
    """Rows and columns of each image, int32 [k, 2]; groups of frames, and rows and columns of each, int32 [k, 3]."""
    rows, columns = samples.image_rows[view.items], samples.image_columns[view.items]
    if view.reads is not Modality.VIDEO:
        return np.stack([rows, columns], axis=1)
    depths = np.ones_like(rows) if samples.image_depths is None else samples.image_depths[view.items]
    return np.stack([depths, rows // depths, columns], axis=1)


def _image_tasks(
    spec: JobSpec,
    samples: StepSamples,
    images: _Images,
    datasets: Sequence[Dataset],
    target: NDArray[Any] | None,
    installed: Pixels,
) -> Iterator[DecodeTask]:
    """Yield tasks of a few images or clips each, in the order in which storage has them.

    Without a tensor for them, patches and spectrograms go nowhere: validity is wanted all the same.
    """
    of, number = samples.locate(images.index)
    shard, row = np.divmod(samples.sample[of].astype(np.int64), 1 << ROW_BITS)
    dataset = samples.dataset[of]
    rows, columns = (a[images.index].tolist() for a in (samples.image_rows, samples.image_columns))
    tiles = [(0, 0)] * len(rows)
    if samples.image_layout is not None:
        tiles = list(map(tuple, samples.image_layout[images.index, :2].tolist()))
    depths = samples.depths(images.index)
    drawn = draw_transforms(spec.stream, samples, list(zip(of.tolist(), number.tolist(), strict=True)), installed)
    decoding = Decoding(
        sizing=spec.stream.sizing,
        sources=[(datasets[d], datasets[d].shards[s]) for d, s in zip(dataset.tolist(), shard.tolist(), strict=True)],
        shards=list(zip(dataset.tolist(), shard.tolist(), strict=True)),
        places=list(zip(row.tolist(), number.tolist(), strict=True)),
        items=list(map(Item, rows, columns, drawn, tiles, repeat(1) if depths is None else depths.tolist())),
        out=None if target is None else _parts_of(spec, samples, images.index, target),
        valid=images.valid,
    )
    order = np.lexsort((number, row, shard, dataset)).tolist()
    decoding.read_ahead(order)
    for first in range(0, len(order), IMAGES_PER_TASK):
        yield DecodeTask(decoding, order[first : first + IMAGES_PER_TASK])


def _parts_of(spec: JobSpec, samples: StepSamples, items: I64, target: NDArray[Any]) -> list[NDArray[Any]]:
    """The rows of each item in the tensor of a view: of images or, where it holds floats, of clips."""
    if target.dtype == np.float32:
        ends = clip_ends(audio_sizing(spec.stream.sizing), samples, items).tolist()
    else:
        ends = [0, *np.cumsum(num_patches(samples, items)).tolist()]
    return [target[a:b] for a, b in pairwise(ends)]
