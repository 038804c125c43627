"""Members and columns that other files bring for the samples of a shard, by the same keys."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataserver.dataset.errors import DatasetError, Findings, SampleError
from dataserver.dataset.kinds import DUPLICATE_MEMBER, ROW_WITHOUT_SAMPLE, SAMPLE_WITHOUT_ROW, UNUSED_PART
from dataserver.dataset.shards.formats import format_of
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.interface import ShardSource
from dataserver.dataset.shards.media_members import claimed, media_member
from dataserver.dataset.shards.members import Member, Split, caught
from dataserver.dataset.shards.modalities import ONLY_IMAGES, Media
from dataserver.dataset.shards.parquet_columns import parquet_columns
from dataserver.dataset.shards.parts import ImagePart, JoinedFile
from dataserver.dataset.shards.row_match import RowMatch, report_samples
from dataserver.dataset.shards.seen import Seen
from dataserver.dataset.storage.registry import storage_of

MAX_JOINED_BYTES: Final = 1 << 29
"""Limit of the members that are joined to one shard: they are held until their samples come."""
_MEMBER_BYTES: Final = 256
"""Memory of a member, besides its content."""


class JoinedMembers:
    """Members of other tars for the samples of one shard."""

    def __init__(
        self,
        paths: Mapping[int, Path],
        split: Split,
        findings: Findings,
        media: Media = ONLY_IMAGES,
        digests: Mapping[Path, str] = MappingProxyType({}),
    ) -> None:
        """Read all of them; of images, their headers are held.

        Args:
            paths: shards of the same name in other folders, by their numbers.
            split: splits member names into key and extension.
            findings: where what cannot be read is counted.
            media: what is a part of samples.
            digests: SHA-256 of those that need not be hashed.

        Raises:
            DatasetError: two bring the same member, or all hold too much.
        """
        self._findings, self._media, self._digests = findings, media, digests
        self._members: dict[str, dict[str, tuple[Path, Member]]] = {}
        self._keys: dict[Path, set[str]] = {path: set() for path in paths.values()}
        self._num_bytes = 0
        self.image_files: list[JoinedFile] = []
        """Those that hold any image."""
        for number, path in paths.items():
            self._read(number, path, split)

    def _read(self, number: int, path: Path, split: Split) -> None:
        storage, found = storage_of(path), format_of(path.name)
        assert found is not None, path
        has_images, seen = False, Seen()
        with storage.open(path) as file:
            reader = HashingReader(file, storage.etag(str(path)).num_bytes, self._digests.get(path))
            try:
                for member in found.scan(ShardSource(path, reader, split), self._findings):
                    parts = split(member.name) if member.key is None else (member.key, member.name)
                    if parts is None:
                        seen.note_keyless(member.name)
                        continue
                    if (modality := claimed(parts[1], member, self._media)) is not None:
                        image = caught(partial(media_member, modality), member)
                        if isinstance(image, ImagePart):
                            has_images, image = True, image.in_joined(number)
                        member = member._replace(content=None, parsed=image)
                    self._add(path, *parts, member)
            except SampleError as error:
                self._findings.add("", error.kind, f"{path.name}, which is joined: {error.detail}")
            reader.skip(reader.remaining)
        if said := seen.keyless():
            self._findings.add("", UNUSED_PART, f"{path.name}, which is joined: {said}")
        if has_images:
            self.image_files.append(JoinedFile(number, reader.size, reader.hexdigest()))

    def _add(self, path: Path, key: str, extension: str, member: Member) -> None:
        self._num_bytes += _MEMBER_BYTES + len(member.content or b"")
        if self._num_bytes > MAX_JOINED_BYTES:
            raise DatasetError(
                f"{path} and what is joined with it hold more than {MAX_JOINED_BYTES} bytes; make smaller ones"
            )
        self._keys[path].add(key)
        members = self._members.setdefault(key, {})
        if extension in members:
            other = members[extension][0]
            if other != path:
                raise _same_member(key, extension, other, path)
            detail = f"{member.name} comes twice in {path}, which is joined; the first is used"
            self._findings.add(key, DUPLICATE_MEMBER, detail)
            return
        members[extension] = path, member

    def take(self, key: str, has: frozenset[str]) -> Iterator[tuple[str, Member]]:
        """Yield extension and member of all that belongs to a key.

        Args:
            key: of a sample.
            has: extensions of the sample's own members.

        Raises:
            DatasetError: the sample has one of them itself.
        """
        for extension, (path, member) in self._members.get(key, {}).items():
            if extension in has:
                raise _same_member(key, extension, Path("the shard itself"), path)
            yield extension, member

    def finish(self, keys: set[str], findings: Findings) -> None:
        """Count what found no partner.

        Args:
            keys: of all samples in the shard, those that are left out too.
            findings: where it is counted.

        Raises:
            DatasetError: nothing of a file found one.
        """
        for path, given in self._keys.items() if keys else ():
            alone, lacking = sorted(given - keys), sorted(keys - given)
            if given and len(alone) == len(given):
                raise DatasetError(
                    f"nothing in {path} belongs to a sample: the samples are called {min(keys)!a} where it says"
                    f" {alone[0]!a}; name the folder whose files have the same keys"
                )
            if alone:
                detail = f"{len(alone)} of {len(given)} keys of {path} have no sample, the first is {alone[0]!a}"
                findings.add("", ROW_WITHOUT_SAMPLE, detail)
            if lacking:
                detail = f"{len(lacking)} of {len(keys)} samples have nothing in {path}, the first is {lacking[0]!a}"
                findings.add("", SAMPLE_WITHOUT_ROW, detail)


def joined_columns(
    meta: pa.Table, tables: Sequence[Sequence[Path]], keys: Sequence[str], findings: Findings, match: RowMatch
) -> pa.Table:
    """Return columns of samples with those of other tables, by name.

    Args:
        meta: columns of the shard.
        tables: each the parquet files that hold its rows.
        keys: of the samples.
        findings: rows without a sample and samples without a row are counted there.
        match: how rows find samples.

    Raises:
        DatasetError: two bring the same column, no row of one finds a sample, or one cannot be read.
    """
    columns = dict(zip(meta.column_names, meta.columns, strict=True))
    for paths in tables:
        found = _columns_of(paths, keys, findings, match)
        twice = sorted(found.keys() & columns.keys())
        if twice:
            raise DatasetError(
                f"{paths[0]} brings the column {twice[0]!r}, which the samples have already; leave one of the two out"
            )
        columns |= {name: pa.chunked_array([values]) for name, values in found.items()}
    return pa.table(dict(sorted(columns.items())))


def _columns_of(paths: Sequence[Path], keys: Sequence[str], findings: Findings, match: RowMatch) -> dict[str, pa.Array]:
    """The columns of one table; of a key with rows in several files the first one counts."""
    columns: dict[str, pa.Array] = {}
    has_row = pa.array(np.zeros(len(keys), np.bool_))
    for path in paths:
        of_file = Findings()
        try:
            found = parquet_columns(path, keys, of_file, match)
        except (pa.ArrowException, ValueError) as error:
            remedy = "" if isinstance(error, DatasetError) else "; mend it or leave it out"
            raise DatasetError(f"{path}, which is joined, cannot be used ({error}){remedy}") from error
        if match.is_of_all and not pc.any(found.has_row).as_py():
            continue  # it is about other shards
        findings.add_all(of_file)
        for name, values in found.columns.items():
            before = columns.get(name, pa.nulls(len(keys), values.type))
            if before.type != values.type:
                raise DatasetError(
                    f"the column {name!r} of {path} is {values.type}, that of other files there is {before.type}; write"
                    " both with one type"
                )
            columns[name] = pc.if_else(has_row, before, values)
        has_row = pc.or_(has_row, found.has_row)
    if match.is_of_all:
        name = paths[0].name if len(paths) == 1 else f"the {len(paths)} parquet files in {paths[0].parent}"
        report_samples(has_row, keys, name, findings)
    return columns


def _same_member(key: str, extension: str, first: Path, second: Path) -> DatasetError:
    return DatasetError(
        f"{first} and {second} bring the same member .{extension} of sample {key!a}; leave one of the two out"
    )
