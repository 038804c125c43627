"""One shard of an open dataset: sizes, texts, image positions and columns, all from its index."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserver.dataset.errors import FindingReport
from dataserver.dataset.filters import Filter
from dataserver.dataset.index.derived import DerivedColumns, derived_digest, read_derived
from dataserver.dataset.index.format import (
    BATCH_ROWS,
    META_PREFIX,
    IndexHeader,
    read_batch,
    read_columns,
    read_findings,
)
from dataserver.dataset.index.numeric import IMAGE_COLUMNS, NumericColumns, ShardSizes
from dataserver.dataset.index.rules import Conversations, TruncatedImages, read_rules
from dataserver.dataset.index_caches import IndexCaches
from dataserver.dataset.media_columns import media_column, media_columns
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shard_tokens import ShardTokens, TokenizedDocument
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.modalities import AUDIO, IMAGES

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class DocumentParts:
    """The parts of one sample: `kinds` in document order (0 text, 1 image), and its texts."""

    kinds: tuple[int, ...]
    texts: tuple[str, ...]


class ImageRef(NamedTuple):
    """Where an image's encoded bytes lie, its upright size in pixels and its EXIF orientation."""

    shard: int
    """Position of the shard in `Dataset.shards`."""
    offset: int
    length: int
    width: int
    height: int
    orientation: int
    may_be_truncated: bool = False
    """Whether its data may end too early, by the rules of the index."""
    modality: int = 0
    """Number of what it is (`modalities.MODALITIES`). A clip is of `width` samples, `height` of them in a second, and
    `orientation` channels."""
    frames: int = 0
    """Number of frames in a video, or 0 for an image or a clip."""
    microseconds: int = 0
    """Microseconds that the frames of a video take."""

    @property
    def is_image(self) -> bool:
        """Whether it is neither a clip nor a video."""
        return self.modality == IMAGES.number

    @property
    def is_audio(self) -> bool:
        """Whether it is a clip."""
        return self.modality == AUDIO.number


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One shard of an open dataset."""

    position: int
    file: ShardFile
    header: IndexHeader
    sidecar_columns: Mapping[str, str]
    """Sidecar columns of this shard: name -> Arrow type."""
    known_columns: frozenset[str]
    """Names of the filter columns that any shard of the dataset has, without those of its clips and videos."""
    caches: IndexCaches = field(default_factory=IndexCaches.make)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process a shard has caches of its own."""
        return Shard, (self.position, self.file, self.header, self.sidecar_columns, self.known_columns)

    @property
    def name(self) -> str:
        """Path relative to the dataset root, with slashes."""
        return self.file.name

    @property
    def num_samples(self) -> int:
        """Usable samples; rows are 0 .. num_samples - 1."""
        return self.header.num_samples

    @property
    def may_have_truncated_images(self) -> bool:
        """Whether images whose data end too early are decoded as far as they go."""
        return read_rules(self.header.rules)["truncated-images"] == TruncatedImages.ACCEPT

    @property
    def tokens(self) -> ShardTokens:
        """Counts and ids of its tokens, by tokenizer."""
        return ShardTokens(self.position, self.file, self.header, self.caches)

    @property
    def columns(self) -> Mapping[str, str]:
        """Filter columns of this shard: name -> Arrow type."""
        of_media = {n: kind for n, kind in media_columns(self.header.rules).items() if n not in self.known_columns}
        return {**dict.fromkeys(IMAGE_COLUMNS, "int64"), **of_media, **self.sidecar_columns}

    @property
    def are_chats(self) -> bool:
        """Whether its samples are conversations, which a chat template renders."""
        return read_rules(self.header.rules).get("conversations") == Conversations.CHAT

    @property
    def may_have_audio(self) -> bool:
        """Whether members that are audio, or the sound of videos, are parts of its samples."""
        return "audio" in read_rules(self.header.rules) or self.may_have_sound

    @property
    def may_have_videos(self) -> bool:
        """Whether members that are videos are parts of its samples."""
        return "video" in read_rules(self.header.rules)

    @property
    def may_have_sound(self) -> bool:
        """Whether the sound of videos is a part of its samples."""
        return "video-sound" in read_rules(self.header.rules)

    def keys(self) -> list[str]:
        """Return the samples' keys in row order."""
        keys: list[str] = self._read("key").to_pylist()
        return keys

    def findings(self) -> FindingReport:
        """Return what was left out of this shard, and why."""
        return read_findings(self.file.index_path)

    def sizes(self) -> ShardSizes:
        """Return the sizes of all samples; the texts are not touched."""
        return self._rows()

    def document(self, row: int, tokenizer_digest: str) -> TokenizedDocument:
        """Return the parts of one sample with the token ids of its texts.

        Raises:
            TokensMissingError: this tokenizer's ids are missing; names the command to run.
            ShardReadError: storage failed.
        """
        self.check_row(row)
        return self.tokens.document(row, tokenizer_digest)

    def parts(self, row: int) -> DocumentParts:
        """Return the parts of one sample; decompresses the texts of one record batch."""
        self.check_row(row)
        number, inner = divmod(row, BATCH_ROWS)
        batch = self.caches.texts.get(
            (self.position, number), lambda: read_batch(self.file.index_path, self.header, number, ["kinds", "texts"])
        )
        kinds, texts = batch.column("kinds")[inner].as_py(), batch.column("texts")[inner].as_py()
        return DocumentParts(tuple(kinds), tuple(texts))

    def image(self, row: int, i: int) -> ImageRef:
        """Return where the i-th image of a sample lies.

        Raises:
            IndexError: there is no such row or image.
        """
        return self.images(((row, i),))[0]

    def images(self, places: Iterable[tuple[int, int]]) -> list[ImageRef]:
        """Return where images lie, each given by its row and its number in the sample; raises as `image`."""
        rows = self._rows()
        return [self._image(rows, row, i) for row, i in places]

    def images_of(self, row: int) -> list[ImageRef]:
        """Return where all images of a sample lie, in order. Raises IndexError where there is no such row."""
        self.check_row(row)
        first, end = self._rows().image_offsets[row : row + 2].tolist()
        return self.images((row, i) for i in range(end - first))

    def image_bytes(self) -> npt.NDArray[np.int64]:
        """Return int64[images]: the encoded bytes of each, in row and document order."""
        return self._rows().image_length

    def _image(self, rows: NumericColumns, row: int, i: int) -> ImageRef:
        self.check_row(row)
        first, end = rows.image_offsets[row : row + 2].tolist()
        if not 0 <= i < end - first:
            raise IndexError(f"row {row} of shard {self.name} has {end - first} images, image {i} was asked for")
        at = first + i
        return ImageRef(
            self.position,
            int(rows.image_offset[at]),
            int(rows.image_length[at]),
            int(rows.image_width[at]),
            int(rows.image_height[at]),
            int(rows.orientation[at]),
            self.may_have_truncated_images,
            *(0 if column is None else int(column[at]) for column in rows.optional),
        )

    def column(self, name: str) -> "pa.Array":
        """Return a sidecar column (Arrow array with one value or null per row), the first image's width or height, or
        what there is of clips and videos (`media_columns.py`).

        Where a sidecar has a width or height that is null, the true one stands for it.

        Raises:
            KeyError: this shard has no such column.
        """
        stored = self._read(META_PREFIX + name) if name in self.sidecar_columns else None
        if stored is not None and (name not in IMAGE_COLUMNS or not stored.null_count):
            return stored
        if name not in IMAGE_COLUMNS:
            if name not in self.columns:
                raise KeyError(name)
            return media_column(self._rows(), name)
        true_sizes = self._rows().of_first_images(name)
        if stored is None:
            return true_sizes
        import pyarrow as pa
        import pyarrow.compute as pc

        if not pa.types.is_integer(stored.type) and not pa.types.is_floating(stored.type):
            return stored
        return pc.coalesce(stored, true_sizes.cast(stored.type))

    def keep(
        self,
        sample_filter: Filter | None = None,
        quarantine: Quarantine | None = None,
        transforms: Sequence[str] = (),
    ) -> npt.NDArray[np.bool_]:
        """Return bool[num samples]: True where neither the filter, nor the quarantine, nor a transform leaves it out.

        `transforms` are the keys of those of metadata; raises as `derived`.
        """
        derived = self.derived(transforms)
        kept = derived.stays.copy()
        if sample_filter is not None:
            kept &= sample_filter.mask(derived)
        if quarantine is not None:
            kept &= quarantine.mask(self)
        return kept

    def dropped_for_nulls(self, sample_filter: Filter, transforms: Sequence[str] = ()) -> int:
        """Return how many samples a filter drops for which a column that it names is null."""
        derived = self.derived(transforms)
        return int(np.count_nonzero(~sample_filter.mask(derived) & sample_filter.nulls(derived)))

    def derived(self, transforms: Sequence[str]) -> DerivedColumns:
        """Return the columns with those that transforms of metadata made, by their keys.

        Raises:
            TokensMissingError: the shard was not transformed by one of them; names the command to run.
            DatasetError: two of them made columns of the same name.
        """
        return DerivedColumns(self, {key: self._derived(key) for key in transforms})

    def _derived(self, key: str) -> "pa.Table":
        table = read_derived(self.file, self.header, key)
        self.caches.confirm(self.position, self.file, key, derived_digest(table))
        return table

    def transformed(self, metadata: Sequence[str], texts: Sequence[str]) -> bytes:
        """Return the digest of what transforms made of the shard, which their names and versions do not tell.

        Args:
            metadata: keys of those of metadata.
            texts: what stands for the tokenizer where its ids are those of transformed texts (`texts_key`).

        Raises:
            TokensMissingError: one was not applied; names the command to run.
        """
        for key in metadata:
            if (self.position, key) not in self.caches.made:
                self._derived(key)
        for key in texts:
            if (self.position, key) not in self.caches.made:
                self.tokens.stored(key)
        return hashlib.sha256(b"".join(self.caches.made[self.position, key] for key in (*metadata, *texts))).digest()

    def check_row(self, row: int) -> None:
        """Raise IndexError, which names the shard, if it has no such row."""
        if not 0 <= row < self.num_samples:
            raise IndexError(f"shard {self.name} has {self.num_samples} samples, row {row} was asked for")

    def _read(self, column: str) -> "pa.Array":
        return read_columns(self.file.index_path, self.header, [column]).column(column)

    def _rows(self) -> NumericColumns:
        return self.caches.numeric(self.position, self.file, self.header)
