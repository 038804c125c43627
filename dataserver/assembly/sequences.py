"""The arrays of a backbone or text tower view: token sequences of a microbatch, assembled from tokenized documents.

content_version 2. A sample that is understood (a pair, an interleaved document, text alone):

    BOS  parts in document order  EOS      text part: its tokens; image part: BOI, one IMAGE per embedding, EOI

one that is generated, whose target takes no tokens: `BOS  text  BOI  QUERY ... QUERY`, with other images before the
target among the text; and the text of one that is contrasted with its image: `BOS  text  EOS`. Text that was cut is cut
from the end of the document backward, so what is left is a prefix of all text tokens. Targets of the loss are the text
tokens and EOS of understood samples; labels are shifted: a token's label is the token that follows it.

A part of a document that is split is a sample that is understood; EOS is a target of the last part alone.

With `sizing.marks` further tokens stand before the embeddings of an image and of its tiles; with
`sizing.video.timestamps` around those of each group of frames of a video.

A conversation has the tokens that its chat template writes, and no others but marks; where an image, a clip or a video
goes, the template's token for it is repeated. It is cut behind an answer, with the images that follow. Targets are
tokens of answers alone.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataserver.assembly.document_parts import WHOLE, PartError, part_of
from dataserver.assembly.image_runs import ImageRun, image_runs, images_of, run_tokens
from dataserver.dataset import IMAGE, TEXT, ChatParts, TokenizedDocument
from dataserver.planning import I32, I64
from dataserver.planning.job.fields import MICROSECONDS, Stream, VideoSizing
from dataserver.planning.plan.naming import sample_name
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.plan.rotary_positions import rotary_positions
from dataserver.planning.plan.views import ViewPlan
from dataserver.planning.stream.item_sizes import VideoLengths, has_timestamps, item_tokens, video_sizing
from dataserver.planning.stream.samples import AUDIO, StepSamples, Task, ranges, sums_before
from dataserver.planning.stream.video_frames import sampled_frames

IGNORED: Final = -100
"""Label of a token whose successor is no target."""


class TokenCountError(ValueError):
    """A sample does not have the parts or tokens that it was planned with."""


_OTHER, _TARGET, _IMAGE, _QUERY = range(4)
"""Roles: what a token of a sequence is for. Ids cannot tell, because text may hold any of them. No enumeration, whose
members take Python 3.11 longer to find than all else here."""

_Piece = tuple[I32 | int, int, int]
"""Token ids (or one id, repeated), their number, their role."""


class _Planned(NamedTuple):
    """What the plan says of a sample."""

    number: int
    """Number of the sample in the step."""
    task: int
    text_tokens: int
    """Text tokens that are left."""
    cut: int
    """Text tokens that were cut off."""
    tokens: int
    """Length of the whole sequence."""
    images: list[ImageRun]
    """Its images, clips and videos; where it is generated, the last is the target."""
    part: tuple[int, ...] | None
    """Where it is in its document (`SampleSizes.parts`); None where no documents are split."""

    @property
    def ends(self) -> bool:
        """Whether its document ends with it."""
        return self.part is None or self.part[0] == self.part[1] - 1


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The tokens of all samples of a view, one after the other."""

    ids: I32
    """int32 [tokens]: id of each token."""
    roles: NDArray[np.uint8]
    """uint8 [tokens]: role of each token."""
    lengths: NDArray[np.int64]
    """int64 [samples]: tokens of each."""


def backbone_arrays(
    stream: Stream,
    plan: StepPlan,
    view: ViewPlan,
    documents: Iterable[TokenizedDocument],
    lengths: VideoLengths | None = None,
) -> dict[str, I32]:
    """Assemble all tensors of a backbone view by name, each int32 [n].

    Args:
        stream: special tokens and sizing.
        plan: the step.
        view: a view of the backbone.
        documents: the documents of `view.items`, whole; each is asked for when those before it are done with.
        lengths: of `images_of` the samples, where videos have timestamps.

    Raises:
        TokenCountError: a document is not the one that was planned; names the sample.
    """
    tokens = _view_tokens(stream, plan, view, documents, lengths)
    labels = np.full(len(tokens.ids), IGNORED, np.int32)
    # every sample begins with BOS, which is no target: no label crosses from one sample to the next
    target = tokens.roles[1:] == _TARGET
    labels[:-1][target] = tokens.ids[1:][target]
    slot_lengths = np.zeros(plan.sequences_per_microbatch, np.int64)
    np.add.at(slot_lengths, view.slots, tokens.lengths)
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": tokens.ids,
        "labels": labels,
        **_positions(tokens.lengths),
        "cu_sequences": sums_before(slot_lengths),
        "embedding_slots": np.flatnonzero(tokens.roles == _IMAGE),
        "condition_slots": np.flatnonzero(tokens.roles == _QUERY),
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def backbone_rotary_positions(
    stream: Stream, samples: StepSamples, items: I64, arrays: Mapping[str, I32], lengths: VideoLengths | None
) -> I32:
    """Positions in time, height and width of each token, int32 [3, T].

    Args:
        stream: sizing.
        samples: those of the step.
        items: int64 [k]: indices into them of the view's samples.
        arrays: what `backbone_arrays` made of them.
        lengths: of `images_of` the samples, where videos have a rate of positions.
    """
    index = understood_images(samples, items)
    if lengths is not None:
        lengths = lengths.pick(np.flatnonzero(np.isin(images_of(samples, items), index)))
    grid = np.stack([samples.image_rows[index], samples.image_columns[index]], axis=1).astype(np.int64)
    positions, ends, slots = (arrays[n].astype(np.int64) for n in ("position_ids", "cu_lengths", "embedding_slots"))
    times = _times(samples, index, video_sizing(stream.sizing), lengths)
    if samples.image_modality is not None:  # clips have the positions of text
        is_image = samples.image_modality[index] != AUDIO
        slots = slots[np.repeat(is_image, item_tokens(samples, stream.sizing)[index])]
        grid, times = grid[is_image], None if times is None else times[is_image]
    if times is not None and has_timestamps(stream.sizing):  # each group of frames is an image
        depths = times[:, 0]
        grid[:, 0] //= depths
        grid, times = grid.repeat(depths, axis=0), None
    found = rotary_positions(positions, ends, slots, grid // stream.sizing.merge, times)
    return found.astype(np.int32)


def _times(samples: StepSamples, index: I64, sizing: VideoSizing, lengths: VideoLengths | None) -> I64 | None:
    """How images go on along the axis of time, int64 [k, 3], as `rotary_positions` wants it; None without videos."""
    depths = samples.depths(index)
    if depths is None:
        return None
    times = np.stack([depths, np.ones_like(depths), np.ones_like(depths)], axis=1)
    if sizing.positions_per_second is not None and lengths is not None:
        for n in np.flatnonzero(lengths.frames).tolist():
            frames, taken = int(lengths.frames[n]), int(lengths.microseconds[n])
            step = sizing.positions_per_second * sizing.temporal_patch * taken
            times[n, 1:] = step, sampled_frames(frames, taken, sizing) * MICROSECONDS
    return times


def understood_images(samples: StepSamples, items: I64) -> I64:
    """The images of some samples that are understood. int64 [k], indices into those of the step."""
    first, end = (found[items] for found in samples.images_with(Task.UNDERSTANDING))
    return ranges(first, end - first)


def text_arrays(
    stream: Stream, plan: StepPlan, view: ViewPlan, documents: Iterable[TokenizedDocument]
) -> dict[str, I32]:
    """Assemble all tensors of a text tower's view by name, each int32 [n].

    Arguments and errors are those of `backbone_arrays`.
    """
    tokens = _view_tokens(stream, plan, view, documents, None)
    arrays = {"token_ids": tokens.ids, **_positions(tokens.lengths)}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def _positions(lengths: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The position of each token in its sample, and where each sample begins."""
    cu_lengths = sums_before(lengths)
    return {
        "position_ids": np.arange(cu_lengths[-1]) - np.repeat(cu_lengths[:-1], lengths),
        "cu_lengths": cu_lengths,
    }


def _view_tokens(
    stream: Stream,
    plan: StepPlan,
    view: ViewPlan,
    documents: Iterable[TokenizedDocument],
    lengths_of_videos: VideoLengths | None,
) -> _Tokens:
    """The tokens of a view, whose samples must be as long as the plan has them."""
    samples, items = plan.samples, view.items
    lengths = samples.tokens[items]
    columns = (items, samples.task[items], samples.text_tokens[items], samples.truncated_tokens[items], lengths)
    runs = image_runs(stream.sizing, samples, items, lengths_of_videos)
    parts = [None] * len(items) if samples.parts is None else map(tuple, samples.parts[items].tolist())
    planned = zip(*(column.tolist() for column in columns), runs, parts, strict=True)
    pieces: list[_Piece] = []
    for sample, document in zip(planned, documents, strict=True):
        pieces += _checked_pieces(stream, samples, _Planned(*sample), document)
    starts = sums_before(lengths)[:-1]
    if not np.array_equal(starts, view.starts):
        raise ValueError(
            f"samples begin at tokens {view.starts.tolist()} in the plan, at {starts.tolist()} in the view; the plan "
            "is not consistent"
        )
    return _joined(pieces, lengths)


def _joined(pieces: list[_Piece], lengths: NDArray[np.int64]) -> _Tokens:
    """Lay pieces out one after the other: an array operation for each of them took longer than all else of a view."""
    counts = np.array([count for _, count, _ in pieces], np.int64)
    repeated = [ids if isinstance(ids, int) else None for ids, _, _ in pieces]
    tokens = np.repeat(np.array([id_ or 0 for id_ in repeated], np.int32), counts)
    texts = [ids for ids, _, _ in pieces if not isinstance(ids, int)]
    if texts:
        tokens[np.repeat([id_ is None for id_ in repeated], counts)] = np.concatenate(texts)
    roles = np.repeat(np.array([role for _, _, role in pieces], np.uint8), counts)
    return _Tokens(tokens, roles, lengths)


def _checked_pieces(
    stream: Stream, samples: StepSamples, planned: _Planned, document: TokenizedDocument
) -> list[_Piece]:
    """Return the pieces of one sample's sequence after comparing the document with the plan."""
    if document.chat is not None:
        return list(_checked_chat(stream, samples, planned, document, document.chat))
    part, left_out = planned.part or WHOLE, None
    if planned.task == Task.GENERATION and (part[1] > 1 or document.kinds.count(IMAGE) > 1):
        left_out = planned.cut
    if part[1] > 1 or left_out is not None:
        document = _checked_part(stream, samples, planned, part, document, left_out)
    found = sum(map(len, document.texts))
    counted = planned.text_tokens + (planned.cut if left_out is None else 0)
    if found != counted:
        raise TokenCountError(
            f"{sample_name(stream, samples, planned.number)}: the tokenizer {stream.tokenizer.name} makes {found} "
            f"tokens of its texts, the plan counts {counted}; remove the shard's .tokens files and run dataserver "
            "index with --tokenizer again"
        )
    images = planned.images
    if (document.kinds.count(IMAGE), document.kinds.count(TEXT)) != (len(images), len(document.texts)):
        raise TokenCountError(
            f"{sample_name(stream, samples, planned.number)}: parts of kinds {list(document.kinds)} in the index, "
            f"{len(images)} images in the plan and {len(document.texts)} texts; run dataserver index again"
        )
    if planned.task == Task.GENERATION:
        pieces = list(_generation(stream, document, images, planned.text_tokens))
    elif planned.task == Task.CONTRASTIVE:
        pieces = list(_contrastive(stream, document, planned.text_tokens))
    else:
        pieces = list(_understanding(stream, document, images, planned.text_tokens, planned.ends))
    length = sum(n for _, n, _ in pieces)
    if length != planned.tokens:
        raise TokenCountError(
            f"{sample_name(stream, samples, planned.number)}: its sequence has {length} tokens, the plan counts "
            f"{planned.tokens}; the plan is not consistent"
        )
    return pieces


def _checked_part(
    stream: Stream,
    samples: StepSamples,
    planned: _Planned,
    part: tuple[int, ...],
    document: TokenizedDocument,
    left_out: int | None,
) -> TokenizedDocument:
    """Return the part of a document that a sample is, up to its target where it has one."""
    try:
        return part_of(document, part, planned.text_tokens, len(planned.images), left_out)
    except PartError as error:
        raise TokenCountError(
            f"{sample_name(stream, samples, planned.number)}: {error}; the index or the tokens are not those that were "
            "planned: remove the shard's .tokens files and run dataserver index with --tokenizer again"
        ) from error


def _checked_chat(
    stream: Stream, samples: StepSamples, planned: _Planned, document: TokenizedDocument, chat: ChatParts
) -> Iterator[_Piece]:
    """Yield the pieces of a conversation as far as the plan has it: its own tokens and no others."""
    parts = zip(document.texts, chat.targets, strict=True)
    runs, images = iter(planned.images), iter(chat.images)
    left = planned.tokens - sum(run.tokens for run in planned.images)
    num_targets = 0
    for kind in document.kinds:
        if kind == IMAGE:
            if (run := next(runs, None)) is None:
                break
            yield from _image_pieces(next(images), run, stream)
        else:
            whole, learned = next(parts)
            ids, targets = whole[:left], learned[:left]
            left -= len(ids)
            num_targets += int(np.count_nonzero(targets))
            ends = np.flatnonzero(np.diff(targets)) + 1
            for first, end in pairwise([0, *ends.tolist(), len(ids)]) if len(ids) else ():
                yield ids[first:end], end - first, _TARGET if targets[first] else _OTHER
    if samples.targets is None or (left, next(runs, None), num_targets) != (0, None, samples.targets[planned.number]):
        raise TokenCountError(
            f"{sample_name(stream, samples, planned.number)}: the conversation in the index is not the one that was "
            "planned; remove the shard's .tokens files and run dataserver index with --tokenizer again"
        )


def _understanding(
    stream: Stream, document: TokenizedDocument, images: list[ImageRun], text_tokens: int, ends: bool
) -> Iterator[_Piece]:
    ids = stream.tokenizer
    texts, runs = iter(document.texts), iter(images)
    yield ids.bos, 1, _OTHER
    for kind in document.kinds:
        if kind == TEXT:
            text = next(texts)[:text_tokens]
            text_tokens -= len(text)
            yield text, len(text), _TARGET
        else:
            yield ids.boi, 1, _OTHER
            yield from _image_pieces(ids.image, next(runs), stream)
            yield ids.eoi, 1, _OTHER
    yield ids.eos, 1, _TARGET if ends else _OTHER


def _image_pieces(image: int, run: ImageRun, stream: Stream) -> Iterator[_Piece]:
    """The tokens of an image, those of its embeddings being `image`."""
    for ids, count, is_embedding in run_tokens(image, run, stream.sizing):
        yield ids, count, _IMAGE if is_embedding else _OTHER


def _generation(
    stream: Stream, document: TokenizedDocument, images: list[ImageRun], text_tokens: int
) -> Iterator[_Piece]:
    ids = stream.tokenizer
    before = TokenizedDocument(_without_last_image(document.kinds), document.texts)
    *pieces, _ = _understanding(stream, before, images, text_tokens, ends=False)
    yield from ((found, count, _OTHER if role == _TARGET else role) for found, count, role in pieces)
    yield ids.boi, 1, _OTHER
    yield ids.query, stream.generation.query_tokens, _QUERY


def _without_last_image(kinds: tuple[int, ...]) -> tuple[int, ...]:
    last = max(i for i, kind in enumerate(kinds) if kind == IMAGE)
    return kinds[:last] + kinds[last + 1 :]


def _contrastive(stream: Stream, document: TokenizedDocument, text_tokens: int) -> Iterator[_Piece]:
    yield stream.tokenizer.bos, 1, _OTHER
    yield from _texts(document, text_tokens)
    yield stream.tokenizer.eos, 1, _OTHER


def _texts(document: TokenizedDocument, text_tokens: int) -> Iterator[_Piece]:
    """The first `text_tokens` tokens of all text parts."""
    for text in document.texts:
        yield text[:text_tokens], min(text_tokens, len(text)), _OTHER
        text_tokens -= min(text_tokens, len(text))
