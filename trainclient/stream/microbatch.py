"""A microbatch as the trainer sees it, and how its header is read and checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from disttrain.v1 import microbatch_pb2 as pb
from numpy.typing import NDArray

from dataserver.planning import I64, U64, Bool
from dataserver.planning.plan.plan import ModuleSchedule, Routing, round_size
from dataserver.planning.plan.views import ALIGNMENT, aligned
from trainclient.stream.buffers import Bytes
from trainclient.stream.errors import ProtocolError

Array = NDArray[Any]
TensorT = TypeVar("TensorT")
OtherT = TypeVar("OtherT")

VALIDITIES = frozenset({pb.VALIDITY_UNKNOWN, pb.VALIDITY_VALID, pb.VALIDITY_INVALID})
MAX_TENSORS = 64
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 48

NUMPY_TYPES: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        pb.DATA_TYPE_UINT8: np.dtype("<u1"),
        pb.DATA_TYPE_INT32: np.dtype("<i4"),
        pb.DATA_TYPE_INT64: np.dtype("<i8"),
        pb.DATA_TYPE_FLOAT16: np.dtype("<f2"),
        pb.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
        pb.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    }
)
"""numpy has no bfloat16: those tensors are uint16 words, and `Microbatch.bfloat16` names them."""


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A microbatch of a job."""

    step: int
    microbatch: int = 0

    def after(self, num_microbatches: int) -> "Cursor":
        """The next one, in a step of so many microbatches."""
        if self.microbatch + 1 < num_microbatches:
            return Cursor(self.step, self.microbatch + 1)
        return Cursor(self.step + 1)


@dataclass(frozen=True, slots=True)
class Items:
    """What a view holds, in its order: n samples (backbone, text tower) or n images (elsewhere)."""

    dataset: I64
    """int64 [n]: position in the job's dataset list."""
    epoch: I64
    """int64 [n]: epoch of the dataset."""
    sample: U64
    """uint64 [n]: shard << 32 | row."""
    image: I64
    """int64 [n]: number of the image within its sample; [0] where items are samples."""
    validity: Bytes
    """uint8 [n]: `Validity` of the proto, VALIDITY_UNKNOWN, VALIDITY_VALID or VALIDITY_INVALID. A sample whose validity
    is unknown is as valid as its images: the ranks that decode them know it."""
    part: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64 [n]: number of the part of its document that each is; [0] where the job splits no documents."""

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def valid(self) -> Bool:
        """bool [n]: True where the item is known to be valid."""
        valid: Bool = self.validity == pb.VALIDITY_VALID
        return valid

    @property
    def invalid(self) -> Bool:
        """bool [n]: True where the item is known to be invalid."""
        invalid: Bool = self.validity == pb.VALIDITY_INVALID
        return invalid


@dataclass(frozen=True, slots=True)
class SequenceParallelGroup:
    """Backbone ranks that share the sequences of a microbatch; all of them get the same view."""

    id: int
    degree: int
    ranks: tuple[int, ...]
    reader: int
    """The rank that gets the tensors where they share one fetch."""


class Arriving(Protocol):
    """Tensors of a microbatch that are still arriving."""

    def wait(self) -> float:
        """Wait until they are there. Seconds of it in which the other process waited for a server itself."""


@dataclass(frozen=True, slots=True)
class Microbatch(Generic[TensorT]):
    """What one (module, rank) gets of one microbatch. The proto tells what each tensor holds."""

    header: pb.MicrobatchHeader
    """The header as it was received; all but the tensors follows from it (`read_header`)."""
    job_id: str
    stream_id: str
    plan_hash: bytes
    """SHA-256 of the step's plan, 32 bytes: the same in every view of the step."""
    content_version: int
    step: int
    microbatch: int
    num_microbatches: int
    """Microbatches of this step, equal for all ranks of all modules."""
    text_tokens: int
    """Denominator of the text loss: target tokens of the whole step."""
    target_patches: int
    """Denominator of the generator's loss: target patches of the whole step."""
    items: Items
    sequence_valid: Bool
    """bool [M]: backbone: whether each sequence slot holds anything; [0] elsewhere."""
    routings: tuple[Routing, ...]
    """The entries that leave or reach this rank's microbatch."""
    sequence_parallel_groups: tuple[SequenceParallelGroup, ...]
    schedules: tuple[ModuleSchedule, ...]
    """How many microbatches the stages of each module hold, in the order of the job; their programs follow from it."""
    tensors: Mapping[str, TensorT]
    """Tensors by name, as views of one buffer that is used again when none of them is alive."""
    bfloat16: frozenset[str]
    """Tensors of type bfloat16, which numpy shows as uint16."""
    nbytes: int
    """Bytes of all tensors that were received, and of what lies between them; 0 where they were withheld."""
    wait_s: float
    """Seconds that the caller waited for it."""
    arriving: Arriving | None = None
    """Tensors that another process hands on; what they hold is not there before these have been waited for."""

    @property
    def cursor(self) -> Cursor:
        """Where it stands in the job."""
        return Cursor(self.step, self.microbatch)

    @property
    def last_of_step(self) -> bool:
        """Whether the step ends with it."""
        return self.microbatch + 1 == self.num_microbatches

    @property
    def round(self) -> range:
        """Microbatches of its round: those that all modules run before any goes on, where modules run in phases."""
        size = round_size(self.schedules, self.num_microbatches)
        first = self.microbatch // size * size
        return range(first, min(first + size, self.num_microbatches))

    @property
    def withheld(self) -> bool:
        """Whether another rank of the group has received the tensors, which are not here."""
        return self.header.withheld

    def with_tensors(self, tensors: Mapping[str, OtherT]) -> "Microbatch[OtherT]":
        """The same microbatch with other tensors."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return Microbatch(**{**values, "tensors": MappingProxyType(dict(tensors))})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A checked entry of the tensor table."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    """First byte in the concatenated chunks."""
    encoded_bytes: int
    raw_bytes: int
    compressed: bool


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors that follow a header."""

    entries: tuple[TensorEntry, ...]
    total_bytes: int
    """Bytes of all chunks together."""
    raw_bytes: int
    """Bytes of all tensors after decoding, each at the next multiple of 64."""
    crc32c: int

    @property
    def compressed(self) -> bool:
        """Whether any tensor must be decoded."""
        return any(e.compressed for e in self.entries)


def read_table(header: pb.MicrobatchHeader, max_bytes: int) -> TensorTable:
    """Check a header's tensor table before anything is allocated.

    Args:
        header: as received.
        max_bytes: the largest microbatch, encoded or decoded, that the client takes.

    Raises:
        ProtocolError: the table contradicts itself, or exceeds `max_bytes`.
    """
    if header.total_bytes > max_bytes:
        raise ProtocolError(
            f"it announces a microbatch of {header.total_bytes} bytes, at most {max_bytes} are taken: make "
            "microbatches smaller (execution.microbatch, seq_len, stream.sizing) or raise max_microbatch_bytes"
        )
    _require(len(header.tensors) <= MAX_TENSORS, f"{len(header.tensors)} tensors, at most {MAX_TENSORS} are allowed")
    entries = tuple(_entry(t) for t in header.tensors)
    names = [e.name for e in entries]
    _require(len(set(names)) == len(names), f"tensor names {names} are not unique")
    end = raw_end = 0
    for entry in entries:
        _require(
            end <= entry.offset <= header.total_bytes - entry.encoded_bytes,
            f"tensor {entry.name} lies at {entry.offset} + {entry.encoded_bytes} bytes, which overlaps the one before "
            f"or the end at {header.total_bytes}",
        )
        end = entry.offset + entry.encoded_bytes
        raw_end = aligned(raw_end) + entry.raw_bytes
    if raw_end > max_bytes:
        raise ProtocolError(
            f"it announces tensors of {raw_end} bytes, at most {max_bytes} are taken: make microbatches smaller "
            "(execution.microbatch, seq_len, stream.sizing) or raise max_microbatch_bytes"
        )
    return TensorTable(entries, header.total_bytes, raw_end, header.crc32c)


def read_items(items: pb.Items) -> Items:
    """Check and convert the names of a view's items."""
    lengths = [len(items.dataset), len(items.epoch), len(items.sample), len(items.validity)]
    count = len(items.sample)
    _require(set(lengths) == {count} and len(items.image) in (0, count), f"item arrays of lengths {lengths} differ")
    unknown = set(items.validity) - VALIDITIES
    _require(not unknown, f"items of the unknown validities {sorted(unknown)}")
    _require(len(items.part) in (0, count), f"{len(items.part)} numbers of parts of {count} items")
    return Items(
        _int64(items.dataset),
        _int64(items.epoch),
        np.array(items.sample, np.uint64),
        _int64(items.image),
        np.array(items.validity, np.uint8),
        _int64(items.part),
    )


def read_routing(routing: pb.Routing) -> Routing:
    """Check and convert the routings of a microbatch."""
    columns = [
        _int64(column)
        for column in (
            routing.source_microbatch,
            routing.source_rank,
            routing.source_start,
            routing.target_microbatch,
            routing.target_rank,
            routing.target_start,
            routing.rows,
        )
    ]
    lengths = [len(c) for c in columns]
    _require(len(set(lengths)) == 1, f"routing arrays of lengths {lengths} differ")
    return Routing(routing.source_module, routing.target_module, *columns)


def read_schedules(header: pb.MicrobatchHeader) -> tuple[ModuleSchedule, ...]:
    """Check and convert how many microbatches the stages of all modules hold."""
    found = header.schedules
    _require(
        len({s.module for s in found}) == len(found)
        and all(s.in_flight and min(s.in_flight) >= 1 and s.chunks >= 1 for s in found),
        f"schedules {[(s.module, list(s.in_flight), s.chunks) for s in found]}; each module needs one, with 1 or more "
        "in flight on each stage and 1 or more chunks",
    )
    return tuple(ModuleSchedule(s.module, np.array(s.in_flight, np.int64), s.drain_every, s.chunks) for s in found)


def read_header(header: pb.MicrobatchHeader, table: TensorTable) -> Microbatch[Array]:
    """Everything of a microbatch but its tensors.

    Raises:
        ProtocolError: the header contradicts itself.
    """
    _require(len(header.plan_hash) == 32, f"a plan hash of {len(header.plan_hash)} bytes, 32 are required")
    _require(
        header.microbatch < header.num_microbatches,
        f"microbatch {header.microbatch} of a step that has {header.num_microbatches}",
    )
    return Microbatch(
        header=header,
        job_id=header.job_id,
        stream_id=header.stream_id,
        plan_hash=header.plan_hash,
        content_version=header.content_version,
        step=header.step,
        microbatch=header.microbatch,
        num_microbatches=header.num_microbatches,
        text_tokens=header.denominators.text_tokens,
        target_patches=header.denominators.target_patches,
        items=read_items(header.items),
        sequence_valid=np.array(header.sequence_valid, np.bool_),
        routings=tuple(read_routing(r) for r in header.routings),
        sequence_parallel_groups=tuple(
            SequenceParallelGroup(g.id, g.degree, tuple(g.ranks), g.reader) for g in header.sequence_parallel_groups
        ),
        schedules=read_schedules(header),
        tensors=MappingProxyType({}),
        bfloat16=frozenset(t.name for t in header.tensors if t.dtype == pb.DATA_TYPE_BFLOAT16),
        nbytes=0 if header.withheld else max(table.raw_bytes, table.total_bytes),
        wait_s=0.0,
    )


def _entry(tensor: pb.Tensor) -> TensorEntry:
    dtype = NUMPY_TYPES.get(tensor.dtype)
    if dtype is None:
        raise ProtocolError(f"tensor {tensor.name!r} has the unknown type {tensor.dtype}")
    shape = tuple(tensor.shape)
    spanned = prod(max(extent, 1) for extent in shape[:MAX_DIMENSIONS])  # numpy multiplies them even if one is 0
    _require(
        len(shape) <= MAX_DIMENSIONS and all(extent >= 0 for extent in shape) and spanned < MAX_ELEMENTS,
        f"tensor {tensor.name!r} has the impossible shape {shape[:MAX_DIMENSIONS]}",
    )
    raw_bytes = dtype.itemsize
    for extent in shape:
        raw_bytes *= extent
    _require(
        raw_bytes == tensor.raw_bytes,
        f"tensor {tensor.name!r} of shape {shape} has {tensor.raw_bytes} bytes, {raw_bytes} are required",
    )
    _require(
        tensor.codec in (pb.CODEC_RAW, pb.CODEC_ZSTD), f"tensor {tensor.name!r} has the unknown codec {tensor.codec}"
    )
    compressed = tensor.codec == pb.CODEC_ZSTD
    _require(
        compressed or tensor.encoded_bytes == raw_bytes,
        f"tensor {tensor.name!r} is not compressed, but has {tensor.encoded_bytes} bytes instead of {raw_bytes}",
    )
    _require(tensor.offset % ALIGNMENT == 0, f"tensor {tensor.name!r} lies at {tensor.offset}, no multiple of 64")
    return TensorEntry(tensor.name, dtype, shape, tensor.offset, tensor.encoded_bytes, raw_bytes, compressed)


def _int64(values: Sequence[int]) -> I64:
    return np.array(values, np.int64)


def _require(holds: bool, found: str) -> None:
    if not holds:
        raise ProtocolError(f"it sent {found}")
