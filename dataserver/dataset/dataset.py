"""Read-only handle of an indexed dataset: its shards, its fingerprint, and the bytes of its images.

Opening reads the summary of all indexes, or the schema of each, and nothing else; columns, text batches and file
descriptors are held in small bounded caches. All methods may be called from several threads.
"""

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path

from dataserver.dataset.errors import CaptionError, DatasetError, QuarantineError, ShardReadError, StaleIndexError
from dataserver.dataset.index.chat_counts import CHAT_COLUMN
from dataserver.dataset.index.copies import are_copies_allowed, check_copies
from dataserver.dataset.index.flags import index_command
from dataserver.dataset.index.fresh import IndexedShard, read_fresh_index
from dataserver.dataset.index.numeric import IMAGE_COLUMNS
from dataserver.dataset.index.rules import read_rules
from dataserver.dataset.index.sets import ShardSet, earlier_sets, find_set, fingerprint_of
from dataserver.dataset.index.summary import Summary
from dataserver.dataset.index_caches import IndexCaches
from dataserver.dataset.open_shards import OpenShards
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shard import ImageRef, Shard
from dataserver.dataset.shard_tokens import TokenizedDocument
from dataserver.dataset.shards.captions import COLUMN_PREFIX, OWN
from dataserver.dataset.shards.listing import ShardFile, index_folder, list_shards
from dataserver.dataset.storage.index_mirror import pull
from dataserver.dataset.storage.pieces import BlockKey, Piece, Source
from dataserver.dataset.storage.urls import location
from dataserver.images import MAX_IMAGE_BYTES
from dataserver.planning.stream.captions import CHAT_PREFIX, TEXT_MARK

_log = logging.getLogger(__name__)


class Dataset:
    """An indexed dataset, opened for reading."""

    def __init__(self, shards: tuple[Shard, ...], quarantine: Quarantine | None, open_shards: OpenShards) -> None:
        self.shards = shards
        self.quarantine = quarantine
        self.fingerprint = fingerprint_of((shard.name, shard.header) for shard in shards)
        """sha256, hex, of the names, bytes and index columns of all shards; the same for a copy elsewhere."""
        self.has_audio = any(shard.may_have_audio for shard in shards)
        """Whether clips may be parts of its samples."""
        self.are_chats = any(shard.are_chats for shard in shards)
        """Whether its samples are conversations, which a chat template renders."""
        self.has_videos = any(shard.may_have_videos for shard in shards)
        """Whether videos may be parts of its samples."""
        self.has_sound = any(shard.may_have_sound for shard in shards)
        """Whether the sound of videos may be."""
        there = {"audio": self.has_audio, "video": self.has_videos}
        self.media = tuple(kind for kind, is_there in there.items() if is_there)
        """What may be parts of its samples beside images, as chats call it."""
        self._open_shards = open_shards
        self._earlier: dict[str, Dataset] = {}
        """By fingerprint; what was asked for in vain is not in it, since anybody may ask for anything."""
        self._finding = threading.Lock()

    @classmethod
    def open(
        cls,
        path: Path,
        index_dir: Path | None = None,
        quarantine: Path | None = None,
        may_be_empty: bool = False,
        lazily: bool = True,
    ) -> "Dataset":
        """Open the dataset at `path`, a folder of shards or one shard.

        Args:
            path: where the shards lie.
            index_dir: where the indexes lie instead of beside the shards.
            quarantine: list of samples to leave out.
            may_be_empty: open it even if it has no usable sample.
            lazily: compare shards that may have changed since they were indexed when they are read, not now, unless
                their times say that they did.

        Raises:
            StaleIndexError: an index is missing or does not belong to its shard; names the command to run.
            QuarantineError: the list cannot be read, or names no shard of the folder.
            DatasetError: there is no dataset at `path`, it has no usable sample, or several shards have the same bytes.
        """
        path = location(path)
        listing = list_shards(path, index_dir)
        files = listing.shards
        pull(files[0].root, index_dir)
        summary = Summary.read(index_folder(files[0]))
        summary.warn_of_gone(listing)
        indexed = [read_fresh_index(file, summary, lazily) for file in files]
        if num_unknown := sum(not shard.is_known for shard in indexed):
            _log.warning(
                "%d of %d shards at %s may have changed since they were indexed, for instance because they were copied:"
                " each is read whole before any of its samples is served; %s does so once",
                *(num_unknown, len(files), path, index_command(files[0])),
            )
        _check_rules(path, indexed)
        headers = [(shard.file.name, shard.header) for shard in indexed]
        check_copies(path, headers, are_copies_allowed(index_folder(files[0])), index_command(files[0]))
        if not may_be_empty and not any(shard.header.num_samples for shard in indexed):
            raise DatasetError(
                f"the {len(files)} shards at {path} have no usable sample; see what is wrong: dataserver lint {path}"
            )
        return cls._of(indexed, None if quarantine is None else _listed(quarantine, path, files))

    @classmethod
    def _of(cls, indexed: Sequence[IndexedShard], quarantine: Quarantine | None) -> "Dataset":
        known = frozenset(IMAGE_COLUMNS).union(*(shard.columns for shard in indexed))
        caches = IndexCaches.make()
        shards = tuple(
            Shard(position, shard.file, shard.header, shard.columns, known, caches)
            for position, shard in enumerate(indexed)
        )
        return cls(shards, quarantine, OpenShards(indexed))

    def as_it_was(self, fingerprint: str) -> "Dataset | None":
        """Return the dataset with a fingerprint: this one, or the set of shards that it had before others were added.

        None where it never had that set, or some of its shards are no longer as they were.
        """
        if fingerprint == self.fingerprint:
            return self
        with self._finding:
            if fingerprint not in self._earlier:
                headers = [(shard.name, shard.header) for shard in self.shards]
                found = find_set(self.index_folder, headers, fingerprint)
                indexed = [] if found is None else [s for s in self._open_shards.shards if s.file.name in found.names]
                if not indexed:
                    return None
                self._earlier[fingerprint] = Dataset._of(indexed, self.quarantine)
            return self._earlier[fingerprint]

    def transformed(self, metadata: Sequence[str], texts: Sequence[str]) -> str:
        """Digest, hex, of what transforms made of all shards, as `Shard.transformed`; empty without transforms."""
        if not metadata and not texts:
            return ""
        digest = hashlib.sha256()
        for shard in self.shards:
            digest.update(shard.transformed(metadata, texts))
        return digest.hexdigest()

    @property
    def captions(self) -> list[str]:
        """Names of the captions that any sample has, besides its own text."""
        shard = self.shards[0]
        asked = [entry.partition("=")[0] for entry in json.loads(read_rules(shard.header.rules)["captions"])]
        return [name for name in asked if COLUMN_PREFIX + name in shard.known_columns]

    def check_captions(self, names: Iterable[str]) -> None:
        """Raise CaptionError if no sample has one of these captions."""
        for name in (name.partition(TEXT_MARK)[0] for name in names):
            if name.startswith(CHAT_PREFIX):
                if CHAT_COLUMN not in self.shards[0].known_columns:
                    raise CaptionError(
                        "the job has conversations, and the index none; index again: "
                        f"{index_command(self.shards[0].file)} --conversations chat --tokenizer NAME=FOLDER"
                    )
                continue
            if name != OWN and name not in self.captions:
                raise CaptionError(
                    f"the job names the caption {name!r}, the index has {[OWN, *self.captions]}; correct the name, or "
                    f"index again: {index_command(self.shards[0].file)} --caption {name}=MEMBER"
                )

    @property
    def index_folder(self) -> Path:
        """Folder in which the indexes lie."""
        return index_folder(self.shards[0].file)

    def earlier_sets(self) -> list[ShardSet]:
        """Return the sets of shards that the dataset had before others were added, oldest first."""
        return earlier_sets(self.index_folder, [(shard.name, shard.header) for shard in self.shards])

    def document(self, shard: int, row: int, tokenizer_digest: str) -> TokenizedDocument:
        """Return the parts of a sample with the token ids of its texts, as `Shard.document`.

        Raises:
            StaleIndexError: the shard has another content than the one that was indexed.
            ShardReadError: storage failed.
            TokensMissingError: this tokenizer's ids are missing; names the command to run.
        """
        self._open_shards.confirm(shard)
        return self.shards[shard].document(row, tokenizer_digest)

    @cached_property  # asked for with every shard of a microbatch's images, where a path would be made each time
    def reads_ahead(self) -> bool:
        """Whether to say early which images will be read gains time."""
        return not self.shards[0].file.storage.is_local

    def read_ahead(self, refs: Sequence[ImageRef]) -> None:
        """Begin to read images, of any shards, that `read_all` will soon ask for. What fails is said there."""
        self._open_shards.read_ahead([(ref.shard, ref.offset, ref.length) for ref in refs])

    def coming(self, refs: Sequence[ImageRef]) -> "list[Future[bytes]]":
        """What is read ahead of images of one shard and is not here: on its way, or failed."""
        return self._open_shards.coming(refs[0].shard, [(ref.offset, ref.length) for ref in refs])

    def blocks(self, shard: int, low: int, high: int) -> list[tuple[BlockKey, Source]]:
        """Return the blocks of a store in which some rows of a shard lie, and where each is read from.

        Args:
            shard: position of the shard.
            low: where the rows begin, from 0 to `PARTS`.
            high: where they end.

        Raises:
            OSError: the store does not tell the state of the shard.
        """
        return self._open_shards.blocks(shard, low, high)

    def pieces(self, digest: bytes, ranges: Sequence[tuple[int, int]]) -> list[Piece] | None:
        """Return ranges of the object that a digest names, as `OpenShards.pieces`; None unless this dataset reads
        ahead."""
        return self._open_shards.pieces(digest, ranges) if self.reads_ahead else None

    def read(self, ref: ImageRef) -> bytes:
        """Read an image's encoded bytes.

        Raises:
            ShardReadError: storage failed or gave fewer bytes than the index promises; says nothing about the sample.
            StaleIndexError: the shard has another content than the one that was indexed.
        """
        return self.read_all((ref,))[0]

    def read_all(self, refs: Sequence[ImageRef]) -> list[bytes]:
        """Read the encoded bytes of one or more images, all of one shard; raises as `read`."""
        for ref in refs:
            if not 0 <= ref.length <= MAX_IMAGE_BYTES:
                name = self.shards[ref.shard].name
                raise ShardReadError(f"shard {name}: an image of {ref.length} bytes, the limit is {MAX_IMAGE_BYTES}")
        return self._open_shards.read(refs[0].shard, [(ref.offset, ref.length) for ref in refs])


def _listed(quarantine: Path, path: Path, shards: Sequence[ShardFile]) -> Quarantine:
    """The samples that a list leaves out of a dataset. Raises QuarantineError where it is of another folder."""
    found = Quarantine.load(quarantine)
    unknown = sorted(found.keys.keys() - {shard.name for shard in shards})
    if not unknown:
        return found
    of_all = f"{len(unknown)} of the {len(found.keys)} shards on the quarantine list {quarantine}"
    seen = f"the first is {unknown[0]!a} (a shard there is {shards[0].name!a})"
    what = f"{of_all} are not in the dataset at {path}, {seen}"
    if len(unknown) == len(found.keys) and shards[0].dataset is None:  # else the list may be of the whole folder
        raise QuarantineError(f"{what}: it would leave out nothing; name the list that dataserver lint {path} writes")
    _log.warning("%s; of these nothing is left out", what)
    return found


def _check_rules(path: Path, shards: Sequence[IndexedShard]) -> None:
    """Raise StaleIndexError if some samples were made by other rules than the others."""
    by_rules: dict[str, str] = {}
    for shard in shards:
        by_rules.setdefault(shard.header.rules, shard.file.name)
    if len(by_rules) > 1:
        shown = ", ".join(f"{name} by {rules!a}" for rules, name in list(by_rules.items())[:4])
        command = index_command(shards[0].file)
        raise StaleIndexError(
            f"the shards at {path} were indexed by different rules ({shown}); index it again: {command}"
        )
