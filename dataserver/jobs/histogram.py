"""How many samples of a dataset have which size: what `trainclient orchestrate` chooses layouts by."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataserver.dataset import Dataset, Progress, compile_filter
from dataserver.jobs.shard_statistics import Rules, columns_of, rows_left
from dataserver.planning import I64
from dataserver.planning.job.fields import MICROSECONDS, Modality, Sizing
from dataserver.planning.stream.chats import fit_chats
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.gathering import PickedRows, picked_chats, picked_rows
from dataserver.planning.stream.item_sizes import item_marks, item_tokens
from dataserver.planning.stream.samples import IMAGE, MODALITY_NUMBERS, VIDEO

TEXT_BITS: Final = 5
"""Texts are counted with those whose tokens agree in so many leading binary digits, so within some percent."""

MOST_SIZES: Final = 20_000
"""Sizes that are told apart: more make the choice of a layout no better, and slower."""


class Size(NamedTuple):
    """What a sample takes. Its items are images, clips and videos, in the order of the sample."""

    text_tokens: int
    patches: tuple[int, ...]
    """Size of each item: patches of an image or a video, positions of a clip."""
    image_tokens: tuple[int, ...] = ()
    """Backbone tokens of each item with the text between its parts, where images are cut into tiles or videos have
    timestamps; else they follow from the patches."""
    modality: tuple[int, ...] = ()
    """Number of what each item is; empty where all are images."""
    groups: tuple[int, ...] = ()
    """Groups of frames of each item, 1 of other items; empty where there are no videos."""
    layouts: tuple[tuple[int, ...], ...] = ()
    """Layout of each item, where images are cut into tiles (`planning.stream.tiles`)."""
    image_texts: tuple[int, ...] = ()
    """Text tokens before each item, where images of documents may be generated."""


@dataclass(slots=True)
class MediaTotal:
    """All clips, or all videos, of some samples."""

    items: int = 0
    seconds: float = 0.0
    """Seconds that clips and videos take as they are stored."""
    tokens: int = 0
    """That they take in the backbone."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The samples of a dataset by their sizes."""

    sizes: Counter[Size] = field(default_factory=Counter)
    media: Mapping[Modality, MediaTotal] = field(
        default_factory=lambda: {Modality.AUDIO: MediaTotal(), Modality.VIDEO: MediaTotal()}
    )
    """Totals of clips and of videos."""
    chats: Counter[str] = field(default_factory=Counter)
    """How many conversations are longer than a sequence: those that are left out (`left_out`) and those that are cut
    behind an answer (`cut`)."""


def size_histogram(
    dataset: Dataset,
    rules: Rules,
    progress: Progress,
    seq_len: int | None = None,
    with_texts: bool = False,
) -> Counted:
    """Samples by their sizes, of documents that are split parts; what filter, quarantine and transforms of metadata
    leave out is not counted.

    Args:
        dataset: the open dataset.
        rules: which samples count, and how they are sized.
        progress: told how many shards are done, and how many there are.
        seq_len: of conversations: those that are longer are cut as `rules.captions` says, or left out; None counts
            whole ones.
        with_texts: count the text before each item as well, which decides where documents may be generated.

    Raises:
        TokensMissingError: a shard is not counted for the tokenizer, or not transformed; names the command.
        DatasetError: an index cannot be read.
    """
    compiled, found = compile_filter(rules.filter) if rules.filter else None, Counted()
    for number, shard in enumerate(dataset.shards, 1):
        columns = columns_of(shard, rules)
        kept = rows_left(shard, compiled, rules)
        picked = _picked(columns, kept, rules, seq_len, found.chats)
        _add(found, columns, picked, rules, with_texts)
        progress(number, len(dataset.shards))
    return found


def _picked(columns: ShardColumns, row: I64, rules: Rules, seq_len: int | None, long_chats: Counter[str]) -> PickedRows:
    """The samples of some rows; conversations as far as a sequence holds them."""
    if columns.chats is None or seq_len is None:
        return picked_rows(columns, row, rules.split, rules.sizing)
    fitted = fit_chats(rules.sizing, seq_len, columns, cut_at_turn=rules.captions.cut_at_turn)
    is_long, fits = fitted.lengths[row] > seq_len, fitted.fits[row]
    long_chats.update(left_out=int((is_long & ~fits).sum()), cut=int((is_long & fits).sum()))
    return picked_chats(columns, row, fitted)


def _add(found: Counted, columns: ShardColumns, picked: PickedRows, rules: Rules, with_texts: bool) -> None:
    """Count the samples of a shard."""
    sized = picked.sizes(columns, rules.sizing)
    modality = sized.image_modality
    tokens = item_tokens(sized, rules.sizing) + item_marks(sized, rules.sizing)
    if modality is not None:
        seconds = _seconds(columns, picked.images, modality)
        for name, total in found.media.items():
            of = modality == MODALITY_NUMBERS[name]
            total.items += int(of.sum())
            total.seconds += float(seconds[of].sum())
            total.tokens += int(tokens[of].sum())
    empty: list[Any] = []
    layouts, depths = sized.image_layout, sized.image_depths
    of_items = [
        (sized.image_rows.astype(np.int64) * sized.image_columns).tolist(),
        empty if layouts is None and sized.image_marks is None else tokens.tolist(),
        empty if modality is None else modality.tolist(),
        empty if depths is None else depths.tolist(),
        empty if layouts is None else list(map(tuple, layouts.tolist())),
        [_leading(n) for n in picked.texts_before(columns).tolist()] if with_texts else empty,
    ]
    for text, (first, end) in zip(picked.text_tokens.tolist(), pairwise(picked.image_offsets.tolist()), strict=True):
        found.sizes[_size(_leading(text), [tuple(column[first:end]) for column in of_items])] += 1


def _size(text: int, columns: list[tuple[Any, ...]]) -> Size:
    """A size by its items; what all samples of a dataset without clips and videos have says nothing."""
    patches, tokens, modality, groups, layouts, texts = columns
    if modality.count(IMAGE) == len(modality):
        modality = ()
    if VIDEO not in modality:
        groups = ()
        tokens = tokens if layouts else ()
    return Size(text, patches, tokens, modality, groups, layouts, texts)


def _seconds(columns: ShardColumns, items: I64 | slice, modality: NDArray[np.uint8]) -> NDArray[np.float64]:
    """How long clips and videos are; what it says of images means nothing. float64 [m]."""
    found: NDArray[np.float64] = columns.image_width[items] / np.maximum(columns.image_height[items], 1)
    if columns.lengths is None:
        return found
    return np.where(modality == VIDEO, columns.lengths.microseconds[items] / MICROSECONDS, found)


def thinned(found: Counter[Size], most: int = MOST_SIZES) -> Counter[Size]:
    """Return as many samples of at most so many sizes: some in the order of sizes stand for those around them.

    Those with the longest text, the largest item of each modality and the most patches stay, since memory goes by them.
    """
    if len(found) <= most:
        return found
    sizes = sorted(found)
    largest = {max(sizes, key=lambda s: s.text_tokens), max(sizes, key=lambda s: sum(s.patches))}
    for modality in MODALITY_NUMBERS.values():
        most_of, largest_of = max((_largest(size, modality), size) for size in sizes)
        largest |= {largest_of} if most_of else set()
    ends, number = np.cumsum([found[s] for s in sizes]), most - len(largest)
    total = int(ends[-1]) - len(largest)
    bounds = np.arange(number + 1) * total // number
    chosen = np.searchsorted(ends, (bounds[:-1] + bounds[1:]) // 2, side="right")
    left = Counter(largest)
    for at, count in zip(chosen.tolist(), np.diff(bounds).tolist(), strict=True):
        left[sizes[at]] += count
    return left


def _largest(size: Size, number: int) -> int:
    """Patches of the largest item of a modality."""
    of = size.modality or (IMAGE,) * len(size.patches)
    return max((patches for patches, found in zip(size.patches, of, strict=True) if found == number), default=0)


def _leading(tokens: int) -> int:
    """The leading binary digits of a number of tokens, rounded."""
    low = max(0, tokens.bit_length() - TEXT_BITS)
    return (tokens + (1 << low >> 1)) >> low << low


def sizes_data(sizing: Sizing, media: Mapping[Modality, MediaTotal], found: Counter[Size]) -> dict[str, Any]:
    """Sizes as a file has them, for JSON: what `trainclient.orchestrate.sample_sizes.read_sizes` reads.

    Args:
        sizing: by which samples were sized.
        media: all clips and videos.
        found: the sizes; those without anything are left out.
    """
    names = {number: str(name) for name, number in MODALITY_NUMBERS.items()}
    samples = []
    for size, count in sorted(found.items()):
        if not (size.text_tokens or size.patches):
            continue
        data = {name: value for name, value in size._asdict().items() if value != () or name == "patches"}
        if size.modality:
            data["modality"] = [names[number] for number in size.modality]
        samples.append({"count": count, **data})
    totals = {str(name): asdict(total) for name, total in media.items() if total.items}
    written = {"sizing": sizing.model_dump(mode="json", exclude_none=True)}
    return {**written, **({"media": totals} if totals else {}), "samples": samples}
