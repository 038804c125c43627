"""Indexing one shard: from its members and its sidecar to its index file."""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa

from dataserver.audio import MAX_CLIP_SECONDS
from dataserver.dataset.errors import Findings, RefusedShardError, ShardReadError, canonical
from dataserver.dataset.index.caption_texts import CaptionTexts
from dataserver.dataset.index.chat_texts import ChatTexts
from dataserver.dataset.index.column_texts import texts_of_columns
from dataserver.dataset.index.columns import CORE_SCHEMA, MEDIA_SCHEMA
from dataserver.dataset.index.external_files import images_root, write_external
from dataserver.dataset.index.format import (
    BATCH_ROWS,
    DOCUMENTS_KEY,
    EXTERNAL_KEY,
    FINDINGS_KEY,
    FORMAT_VERSION,
    FORMATS_KEY,
    HEADER_KEY,
    JOINED_KEY,
    META_PREFIX,
    NO_SIDECAR,
    PAGES_KEY,
    READ_IMAGES,
    READ_TEXTS,
    SUMS_KEY,
    TEXTS_KEY,
    IndexHeader,
    arrow_writer,
)
from dataserver.dataset.index.fresh import IndexedShard
from dataserver.dataset.index.joins import PARQUET_SUFFIX, ShardJoins, State, known_digests, write_joined
from dataserver.dataset.index.known import state_of, write_known
from dataserver.dataset.index.numeric import numeric_path, write_numeric
from dataserver.dataset.index.rules import (
    DEFAULT_RULES,
    Conversations,
    IndexRules,
    KeyEnd,
    LoneTexts,
    MediaMembers,
    MetadataKeys,
    MissingImages,
    SeveralImages,
    TextOnly,
    lone_texts_of,
    read_rules,
    written_rules,
)
from dataserver.dataset.kinds import LONG_AUDIO, LOST_IMAGE, UNUSED_AUDIO, UNUSED_PART, UNUSED_VIDEO
from dataserver.dataset.shards.captions import CaptionSource, caption_lists, captions_in_members
from dataserver.dataset.shards.documents import DOCUMENT_FORMS
from dataserver.dataset.shards.external import ExternalFiles
from dataserver.dataset.shards.hashing import BlockSums, HashingReader
from dataserver.dataset.shards.interface import ShardSource
from dataserver.dataset.shards.joined import JoinedMembers, joined_columns
from dataserver.dataset.shards.listing import ShardFile
from dataserver.dataset.shards.lone_texts import without_failures, without_orphans
from dataserver.dataset.shards.modalities import AUDIO, VIDEO, is_long_clip, served_media
from dataserver.dataset.shards.pages import Page, encode_pages
from dataserver.dataset.shards.parts import ImagePart, JoinedFile
from dataserver.dataset.shards.row_match import RowMatch
from dataserver.dataset.shards.sample_rules import SampleRules
from dataserver.dataset.shards.samples import Sample, read_samples
from dataserver.dataset.shards.scalar_rows import ScalarRows
from dataserver.dataset.shards.seen import Seen
from dataserver.dataset.shards.sidecar import failed_downloads, named_images, promised_images, read_sidecar
from dataserver.dataset.storage.digests import digest_file
from dataserver.dataset.storage.etags import NOT_REGULAR, Etag


class RowCollector:
    """Turns samples into record batches as they come, so that a shard's texts are held once, as UTF-8."""

    def __init__(self, has_videos: bool = False) -> None:
        self._schema = MEDIA_SCHEMA if has_videos else CORE_SCHEMA
        self._num_fields = self._schema.field("images").type.value_type.num_fields
        self.keys: list[str] = []
        self.batches: list[pa.RecordBatch] = []
        self._pending: list[Sample] = []
        self._digest = hashlib.sha256()

    def add(self, sample: Sample) -> None:
        """Append the row of a sample."""
        self.keys.append(sample.key)
        self._pending.append(sample)
        images = [image[: self._num_fields] for image in sample.images]
        self._digest.update(canonical([sample.key, sample.kinds, sample.texts, images]))
        if len(self._pending) == BATCH_ROWS:
            self._flush()

    def finish(self) -> str:
        """Flush the last batch and return the digest of the core columns."""
        if self._pending:
            self._flush()
        return self._digest.hexdigest()

    def _flush(self) -> None:
        rows = self._pending
        columns = [
            [row.key for row in rows],
            [row.kinds for row in rows],
            [[len(text.encode()) for text in row.texts] for row in rows],
            [row.texts for row in rows],
        ]
        arrays = [pa.array(c, field.type) for c, field in zip(columns, CORE_SCHEMA, strict=False)]
        arrays.append(_image_lists([row.images for row in rows], self._schema.field("images").type))
        self.batches.append(pa.record_batch(arrays, schema=self._schema))
        self._pending = []


def _image_lists(rows: Sequence[Sequence[ImagePart]], kind: pa.ListType) -> pa.ListArray:
    """The column of images, put together field by field: Arrow takes far longer for dictionaries."""
    of = [*kind.value_type]
    columns = [*zip(*(image[: len(of)] for images in rows for image in images), strict=True)] or [()] * len(of)
    fields = [pa.array(column, field.type) for column, field in zip(columns, of, strict=True)]
    ends = pa.array(accumulate(map(len, rows), initial=0), pa.int32())
    images = pa.StructArray.from_arrays(fields, fields=of)
    return pa.ListArray.from_arrays(ends, images, kind)


def digest_columns(
    core_digest: str, meta: pa.Table, rules: str, joined: Sequence[JoinedFile] = (), external_digest: str = ""
) -> str:
    """Return the digest over rules, core columns and sidecar columns: logical values, not file bytes.

    It covers the bytes of other files that images lie in, as a fingerprint covers those of shards: of joined ones, and,
    by their own digest, of those of a manifest or a folder.
    """
    digest = hashlib.sha256(f"{core_digest}{external_digest}".encode())
    digest.update(canonical(rules))
    if joined:
        digest.update(canonical(joined))
    for column in meta.column_names:
        values = meta.column(column)
        digest.update(canonical([column, str(values.type)]))
        for start in range(0, len(values), BATCH_ROWS):
            digest.update(canonical(values.slice(start, BATCH_ROWS).to_pylist()))
    return digest.hexdigest()


def write_index(
    path: Path,
    header: IndexHeader,
    findings: Findings,
    batches: Sequence[pa.RecordBatch],
    meta: pa.Table,
    pages: Sequence[Page] = (),
    joined: Sequence[JoinedFile] = (),
    external_digest: str = "",
    block_sums: Sequence[int] = (),
) -> str:
    """Write an index atomically, and its numeric columns once more beside it; why not, where that is impossible."""
    metadata = {HEADER_KEY: canonical(asdict(header)), FINDINGS_KEY: findings.to_json()}
    metadata[FORMATS_KEY] = READ_IMAGES.encode()
    metadata[DOCUMENTS_KEY] = DOCUMENT_FORMS.encode()
    metadata[TEXTS_KEY] = READ_TEXTS.encode()
    if pages:
        metadata[PAGES_KEY] = encode_pages(pages)
    if joined:
        metadata[JOINED_KEY] = canonical(joined)
    if block_sums:
        metadata[SUMS_KEY] = struct.pack(f"<{len(block_sums)}I", *block_sums)
    if external_digest:
        metadata[EXTERNAL_KEY] = external_digest.encode()
    fields = [pa.field(META_PREFIX + name, meta.schema.field(name).type) for name in meta.column_names]
    core = MEDIA_SCHEMA if "video" in read_rules(header.rules) else CORE_SCHEMA
    schema = pa.schema([*core, *fields], metadata)
    with arrow_writer(path, schema, "lz4") as writer:
        numeric_path(path).unlink(missing_ok=True)  # of the index before: a build that is killed would leave it
        start = 0
        for batch in batches:
            columns = [c.combine_chunks() for c in meta.slice(start, batch.num_rows).columns]
            writer.write_batch(pa.record_batch([*batch.columns, *columns], schema=schema))
            start += batch.num_rows
    return write_numeric(path, header)


class _Statuses:
    """What a sidecar says of failed downloads; it is read for the first text without an image."""

    def __init__(self, path: Path | None, keys: MetadataKeys) -> None:
        self._path = path
        self._by_last_part = keys is MetadataKeys.LAST_PART

    @cached_property
    def _failed(self) -> Mapping[str, str]:
        return failed_downloads(self._path, self._by_last_part)

    def of(self, key: str) -> str | None:
        """Return the status of a key, where it is no success. Raises OSError where storage failed."""
        return self._failed.get(key.rpartition("/")[2] if self._by_last_part else key)


def _sidecar_digest(shard: ShardFile, etag: Etag | None) -> str:
    """The SHA-256 of the sidecar, as hexadecimal digits; empty without a regular file."""
    if shard.sidecar_path is None or etag is None or etag.num_bytes == NOT_REGULAR:
        return ""
    return digest_file(shard.sidecar_path)


class _Read(NamedTuple):
    """What one pass over the members of a shard gives."""

    rows: RowCollector
    scalars: ScalarRows
    captions: CaptionTexts
    chats: ChatTexts | None
    without_image: list[int]
    """Rows of samples that have none."""
    seen: Seen
    findings: Findings
    others: JoinedMembers | None
    """Members that joined tars add, or None without joined tars."""
    external: ExternalFiles | None
    pages: Sequence[Page]
    core_digest: str
    sha256: str
    """SHA-256 of the shard's bytes, hexadecimal."""
    block_sums: Sequence[int]
    """CRC-32C of each block of the shard."""


def index_shard(
    shard: ShardFile,
    rules: IndexRules = DEFAULT_RULES,
    lone_texts: LoneTexts | None = None,
    before_rules: IndexedShard | None = None,
    joins: ShardJoins = ShardJoins(),  # noqa: B008  it is frozen
) -> str:
    """Index one shard in one sequential pass; why a file beside the index was not written, where that is impossible.

    Args:
        shard: the shard.
        rules: what the user chose.
        lone_texts: what becomes of texts without an image; by default what the shard itself suggests.
        before_rules: its index by other rules, whose digests need not be made again while the files are the same.
        joins: what other files bring.

    Raises:
        ShardReadError: the shard or a joined file cannot be read, or changes meanwhile.
        DatasetError: the sidecar belongs to another shard, the index cannot be written, or a column named as a caption
            holds no texts.
    """
    findings = Findings()
    try:
        before = shard.settled_etags()
        joins.report_missing(findings)
        joined = joins.state()
        same = before_rules if before_rules is not None and before_rules.etags == before else None
        known_sha256 = None if same is None else same.header.sha256
        digests = {} if before_rules is None else known_digests(before_rules.file, before_rules.header, joined)
        if known_sha256 is not None:
            digests[shard.path] = known_sha256
        read_members = partial(_read_members, shard, before[0].num_bytes, digests, rules, lone_texts, joins)
        read = _unless_refused(read_members)
        texts = texts_of_columns(shard, rules, joins, read.seen.without_text, read.seen.keys)
        if texts:  # pairs whose only text is in a column: rare, and known when all members were seen
            digests[shard.path] = read.sha256
            read = _unless_refused(partial(read_members, texts))
        findings.add_all(read.findings)
        meta = _columns(shard, rules, read, joins, findings)
        sidecar_sha256 = _sidecar_digest(shard, before[1]) if same is None else same.header.sidecar_sha256
        changed = before != shard.etags() or joined != joins.state()
    except OSError as error:
        raise ShardReadError(f"cannot read shard {shard.path}: {error}; make it readable and index again") from error
    if changed:
        raise ShardReadError(f"shard {shard.path} changed while it was indexed; index again when it is complete")
    written = written_rules(lone_texts or lone_texts_of(rules, read.seen.has_images), rules)
    return _written(shard, read, meta, written, before, sidecar_sha256, findings, joined)


def _unless_refused(read: Callable[..., _Read]) -> _Read:
    """What is read of a shard; where it refuses its members late, once more without any."""
    try:
        return read()
    except RefusedShardError as error:  # what was made of the members before is of no use
        return read(refused=str(error))


def _sample_rules(rules: IndexRules, in_members: tuple[CaptionSource, ...], texts: Mapping[str, str]) -> SampleRules:
    """What members make a sample, by what the user chose, the captions in members, and texts by key from elsewhere."""
    return SampleRules(
        rules.key is KeyEnd.LAST_DOT,
        rules.several_images is SeveralImages.ALL,
        in_members,
        rules.images,
        served_media(
            rules.audio is MediaMembers.SERVE,
            rules.video is MediaMembers.SERVE,
            rules.video_sound is MediaMembers.SERVE,
        ),
        rules.conversations is Conversations.CHAT,
        rules.missing_images is MissingImages.DROP,
        texts,
    )


def _read_members(
    shard: ShardFile,
    num_bytes: int,
    digests: Mapping[Path, str],
    rules: IndexRules,
    lone_texts: LoneTexts | None,
    joins: ShardJoins,
    texts: Mapping[str, str] = MappingProxyType({}),
    refused: str = "",
) -> _Read:
    """Read the samples of a shard of so many bytes, with the members of joined tars.

    Digests are those of the shard and of joined files, where they need not be hashed. Texts are those of images that
    have none among their members, by key.

    Raises:
        OSError: the shard or a joined file cannot be read.
        RefusedShardError: no member is to be used, unless `refused` says why.
    """
    findings = Findings()
    in_members = captions_in_members(rules.captions, has_columns=not shard.format.sidecar_suffix)
    sample_rules = _sample_rules(rules, in_members, texts)
    rows, scalars, captions, seen = (
        RowCollector(VIDEO in sample_rules.media),
        ScalarRows(),
        CaptionTexts(rules.captions),
        Seen(),
    )
    chats = ChatTexts() if sample_rules.are_chats else None
    without_image: list[int] = []
    statuses = _Statuses(shard.sidecar_path, rules.metadata_keys)
    with shard.storage.open(shard.path, shard.format.reads_parts) as file:
        sums = BlockSums()
        reader = HashingReader(file, num_bytes, digests.get(shard.path), sums)
        media, external = sample_rules.media, None
        if shard.format.has_external:
            external = ExternalFiles(images_root(shard, rules), num_bytes, media)
        source = ShardSource(
            shard.path,
            reader,
            sample_rules.split,
            external=external,
            media=media,
            are_chats=sample_rules.are_chats,
            lists=caption_lists(in_members),
            refused=refused,
        )
        members = shard.format.scan(source, findings)
        tars = {number: path for number, path in enumerate(joins.files, 1) if path.suffix != PARQUET_SUFFIX}
        others = JoinedMembers(tars, sample_rules.split, findings, media, digests) if tars else None
        samples = read_samples(members, findings, seen, sample_rules, others)
        found = without_failures(samples, statuses.of, findings)
        if lone_texts in (None, LoneTexts.LEFT_OUT) and rules.text_only is not TextOnly.ALLOW:
            found = without_orphans(found, seen, lone_texts is LoneTexts.LEFT_OUT, findings)
        for sample in found:
            rows.add(sample)
            scalars.add(sample.scalars, findings)
            if rules.captions:
                captions.add(sample)
            if chats is not None:
                chats.add(sample.chat)
            if len(media) > 1:
                seen.num_long_clips += sum(is_long_clip(part) for part in sample.images)
            if not sample.images:
                without_image.append(len(rows.keys) - 1)
        reader.skip(reader.remaining)
    _report_seen(seen, findings)
    ends = source.pages, rows.finish(), reader.hexdigest(), sums.values
    return _Read(rows, scalars, captions, chats, without_image, seen, findings, others, external, *ends)


def _report_seen(seen: Seen, findings: Findings) -> None:
    """Add what was seen of members that no sample has whole."""
    if said := seen.keyless():
        findings.add("", UNUSED_PART, said)
    if count := seen.num_unused[AUDIO.name]:
        findings.add("", UNUSED_AUDIO, f"{count} members are audio; index with --audio serve to serve them")
    if count := seen.num_unused[VIDEO.name]:
        findings.add("", UNUSED_VIDEO, f"{count} members are videos; index with --video serve to serve them")
    if seen.num_long_clips:
        cut = f"are longer than {MAX_CLIP_SECONDS} s, and cut there or at a job's sizing.audio.max_seconds"
        findings.add("", LONG_AUDIO, f"{seen.num_long_clips} clips {cut}; split them to use all of them")


def _columns(shard: ShardFile, rules: IndexRules, read: _Read, joins: ShardJoins, findings: Findings) -> pa.Table:
    """The columns of samples, of the shard's sidecar and of what is joined. Raises OSError or DatasetError."""
    keys, rows = read.rows.keys, read.scalars.rows
    match = RowMatch(rules.metadata_keys is MetadataKeys.LAST_PART, read.seen.keys)
    meta = read_sidecar(shard.sidecar_path, keys, rows, findings, match)
    if read.others is not None:
        read.others.finish(read.seen.keys, findings)
    tables = [(path,) for path in joins.files if path.suffix == PARQUET_SUFFIX]
    meta = joined_columns(meta, tables, keys, findings, match)
    meta = joined_columns(meta, joins.tables, keys, findings, replace(match, is_of_all=True))
    meta = read.captions.added_to(meta, keys, shard, findings)
    meta = meta if read.chats is None else read.chats.added_to(meta, shard)
    for row, size in promised_images(read.without_image, meta, rows):
        findings.add(keys[row], LOST_IMAGE, f"the sidecar gives {size}, the tar has no image; served as text")
    if said := named_images(read.without_image, keys, rows):
        findings.add("", LOST_IMAGE, said)
    return meta


def _written(
    shard: ShardFile,
    read: _Read,
    meta: pa.Table,
    rules: str,
    etags: tuple[Etag, Etag | None],
    sidecar_sha256: str,
    findings: Findings,
    joined: State,
) -> str:
    """Write an index and what lies beside it; which of these could not be written, and why."""
    images = [] if read.others is None else read.others.image_files
    external_digest = "" if read.external is None else read.external.digest
    shard_etag, sidecar = etags
    header = IndexHeader(
        format_version=FORMAT_VERSION,
        shard_bytes=shard_etag.num_bytes,
        sidecar_bytes=sidecar.num_bytes if sidecar else NO_SIDECAR,
        sha256=read.sha256,
        sidecar_sha256=sidecar_sha256,
        columns_digest=digest_columns(read.core_digest, meta, rules, images, external_digest),
        num_samples=len(read.rows.keys),
        rules=rules,
        has_images=read.seen.has_images,
    )
    if read.external is not None:
        write_external(shard, read.external)
    others = read.pages, images, external_digest, read.block_sums
    problem = write_index(shard.index_path, header, findings, read.rows.batches, meta, *others)
    write_joined(shard, header, joined)
    return problem or write_known(shard.index_path, header, state_of(etags))
