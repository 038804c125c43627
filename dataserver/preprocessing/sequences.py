"""The arrays of a backbone or text tower view: token sequences of a microbatch, assembled from tokenized documents.

content_version 2. A sample that is understood (a pair, an interleaved document, text alone):

    BOS  parts in document order  EOS      text part: its tokens; image part: BOI, one IMAGE per embedding, EOI

one that is generated, whose image takes no tokens: `BOS  text  BOI  QUERY ... QUERY`, and the text of one that is
contrasted with its image: `BOS  text  EOS`. Text that was cut is cut from
the end of the document backward, so what is kept is a prefix of all text tokens. Targets of the loss are the text
tokens and EOS of understood samples; labels are shifted: a token's label is the token that follows it.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from dataserver.dataset import IMAGE, TEXT, TokenizedDocument
from dataserver.planning.jobspec import Stream
from dataserver.planning.naming import sample_name
from dataserver.planning.plan import StepPlan
from dataserver.planning.samples import I32, StepSamples, Task
from dataserver.planning.views import ViewPlan

IGNORED: Final = -100
"""Label of a token whose successor is no target."""


class TokenCountError(ValueError):
    """A sample does not have the parts or tokens that it was planned with."""


class _Role(IntEnum):
    """What a token of a sequence is for; ids cannot tell, because text may hold any of them."""

    OTHER = 0
    TARGET = 1
    IMAGE = 2
    QUERY = 3


_Piece = tuple[I32 | int, int, _Role]
"""Token ids (or one id, repeated), their number, their role."""


def embeddings(stream: Stream, samples: StepSamples, i: int) -> list[int]:
    """Return the number of backbone tokens of each image of a sample when it is understood."""
    images = slice(int(samples.image_offsets[i]), int(samples.image_offsets[i + 1]))
    rows, columns = samples.image_rows[images].tolist(), samples.image_columns[images].tolist()
    return [r * c // stream.sizing.merge**2 for r, c in zip(rows, columns, strict=True)]


def backbone_arrays(
    stream: Stream, plan: StepPlan, view: ViewPlan, documents: Sequence[TokenizedDocument]
) -> dict[str, I32]:
    """Assemble all tensors of a backbone view by name, each int32 [n].

    Args:
        stream: special tokens and sizing.
        plan: the step.
        view: a view of the backbone.
        documents: the documents of `view.items`.

    Raises:
        TokenCountError: a document is not the one that was planned; names the sample.
    """
    pieces, lengths = _view_pieces(stream, plan, view, documents)
    tokens = _concatenate([np.full(n, ids, np.int32) for ids, n, _ in pieces])
    roles = _concatenate([np.full(n, role, np.int32) for _, n, role in pieces])
    labels = np.full(len(tokens), IGNORED, np.int32)
    # every sample begins with BOS, which is no target: no label crosses from one sample to the next
    labels[:-1][roles[1:] == _Role.TARGET] = tokens[1:][roles[1:] == _Role.TARGET]
    slot_lengths = np.zeros(plan.sequences_per_microbatch, np.int64)
    np.add.at(slot_lengths, view.slots, lengths)
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": tokens,
        "labels": labels,
        **_positions(lengths),
        "cu_sequences": _cumulative(slot_lengths),
        "embedding_slots": np.flatnonzero(roles == _Role.IMAGE),
        "condition_slots": np.flatnonzero(roles == _Role.QUERY),
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def text_arrays(
    stream: Stream, plan: StepPlan, view: ViewPlan, documents: Sequence[TokenizedDocument]
) -> dict[str, I32]:
    """Assemble all tensors of a text tower's view by name, each int32 [n].

    Arguments and errors are those of `backbone_arrays`.
    """
    pieces, lengths = _view_pieces(stream, plan, view, documents)
    tokens = _concatenate([np.full(n, ids, np.int32) for ids, n, _ in pieces])
    return {name: array.astype(np.int32) for name, array in {"token_ids": tokens, **_positions(lengths)}.items()}


def _positions(lengths: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The position of each token in its sample, and where each sample begins."""
    cu_lengths = _cumulative(lengths)
    return {
        "position_ids": np.arange(cu_lengths[-1]) - np.repeat(cu_lengths[:-1], lengths),
        "cu_lengths": cu_lengths,
    }


def _view_pieces(
    stream: Stream, plan: StepPlan, view: ViewPlan, documents: Sequence[TokenizedDocument]
) -> tuple[list[_Piece], NDArray[np.int64]]:
    """The pieces of all samples of a view, and the tokens of each sample, int64 [k]."""
    pieces: list[_Piece] = []
    lengths = np.zeros(view.num_items, np.int64)
    for n, (i, document) in enumerate(zip(view.items.tolist(), documents, strict=True)):
        sample = _checked_pieces(stream, plan.samples, i, document)
        lengths[n] = sum(length for _, length, _ in sample)
        pieces += sample
    starts = _cumulative(lengths)[:-1]
    if not np.array_equal(starts, view.starts):
        raise ValueError(
            f"samples begin at tokens {view.starts.tolist()} in the plan, at {starts.tolist()} in the view; the plan "
            "is not consistent"
        )
    return pieces, lengths


def _checked_pieces(stream: Stream, samples: StepSamples, i: int, document: TokenizedDocument) -> list[_Piece]:
    """Return the pieces of one sample's sequence after comparing the document with the plan."""
    counted = int(samples.text_tokens[i] + samples.truncated_tokens[i])
    found = sum(len(text) for text in document.texts)
    if found != counted:
        raise TokenCountError(
            f"{sample_name(stream, samples, i)}: the tokenizer {stream.tokenizer.name} makes {found} tokens of its "
            f"texts, the plan counts {counted}; remove the shard's .tokens files and run dataserver index with "
            "--tokenizer again"
        )
    images = embeddings(stream, samples, i)
    if (document.kinds.count(IMAGE), document.kinds.count(TEXT)) != (len(images), len(document.texts)):
        raise TokenCountError(
            f"{sample_name(stream, samples, i)}: parts of kinds {list(document.kinds)} in the index, {len(images)} "
            f"images in the plan and {len(document.texts)} texts; run dataserver index again"
        )
    kept = int(samples.text_tokens[i])
    if samples.task[i] == Task.GENERATION:
        pieces = list(_generation(stream, document, kept))
    elif samples.task[i] == Task.CONTRASTIVE:
        pieces = list(_contrastive(stream, document, kept))
    else:
        pieces = list(_understanding(stream, document, images, kept))
    length = sum(n for _, n, _ in pieces)
    if length != samples.tokens[i]:
        raise TokenCountError(
            f"{sample_name(stream, samples, i)}: its sequence has {length} tokens, the plan counts "
            f"{int(samples.tokens[i])}; the plan is not consistent"
        )
    return pieces


def _understanding(stream: Stream, document: TokenizedDocument, images: list[int], kept: int) -> Iterator[_Piece]:
    ids = stream.tokenizer
    texts, sizes = iter(document.texts), iter(images)
    yield ids.bos, 1, _Role.OTHER
    for kind in document.kinds:
        if kind == TEXT:
            text = next(texts)[:kept]
            kept -= len(text)
            yield text, len(text), _Role.TARGET
        else:
            yield ids.boi, 1, _Role.OTHER
            yield ids.image, next(sizes), _Role.IMAGE
            yield ids.eoi, 1, _Role.OTHER
    yield ids.eos, 1, _Role.TARGET


def _generation(stream: Stream, document: TokenizedDocument, kept: int) -> Iterator[_Piece]:
    ids = stream.tokenizer
    yield ids.bos, 1, _Role.OTHER
    yield from _texts(document, kept)
    yield ids.boi, 1, _Role.OTHER
    yield ids.query, stream.generation.query_tokens, _Role.QUERY


def _contrastive(stream: Stream, document: TokenizedDocument, kept: int) -> Iterator[_Piece]:
    yield stream.tokenizer.bos, 1, _Role.OTHER
    yield from _texts(document, kept)
    yield stream.tokenizer.eos, 1, _Role.OTHER


def _texts(document: TokenizedDocument, kept: int) -> Iterator[_Piece]:
    """The first `kept` tokens of all text parts."""
    for text in document.texts:
        yield text[:kept], min(kept, len(text)), _Role.OTHER
        kept -= min(kept, len(text))


def _cumulative(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _concatenate(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
