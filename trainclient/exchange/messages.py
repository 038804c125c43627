"""The stamp of a message between modules: a header of 64 bytes, then a byte for the validity of each item.

Stamps travel beside the rows, between the CPUs. The receiver knows the sizes of both from its own view; the header
proves that the sender means the same, while the rows are still under way. Where features are gathered, both are one
message.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

HEADER_BYTES = 64
HASH_BYTES = 24
"""Of the plan hash that a header carries: enough to tell plans apart."""
_MAGIC = b"DTB2"
_HEADER = struct.Struct("<4sHH24sQIIQII")
"""Magic, kind, chunk, plan hash, step, microbatch, valid bytes, row bytes, source rank, target rank."""


class Kind(IntEnum):
    """What the rows are."""

    EMBEDDINGS = 1
    ACTIVATIONS = 2
    CONDITIONS = 3
    EMBEDDING_GRADIENTS = 4
    ACTIVATION_GRADIENTS = 5
    CONDITION_GRADIENTS = 6
    FEATURES = 7
    """Of the samples of a contrastive batch, which stands in place of a microbatch."""
    NORMALISERS = 8
    """What ranks have found in the scores of these."""


class BrokerMismatchError(RuntimeError):
    """Two ranks that should run the same microbatch of the same plan do not."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The microbatch that a message belongs to."""

    plan_hash: bytes
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Lane:
    """What the messages of one direction of a way carry."""

    kind: Kind
    chunk: int = 0
    """Number of the chunk that sends in the forward pass, between chunks of one module; 0 between modules."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself."""

    kind: int
    chunk: int
    plan_hash: bytes
    step: int
    microbatch: int
    num_valid: int
    row_bytes: int
    source: int
    target: int

    @property
    def stamp_bytes(self) -> int:
        """Bytes of the stamp."""
        return HEADER_BYTES + self.num_valid

    @property
    def rows_offset(self) -> int:
        """First byte of the rows where they follow their stamp."""
        return -(-self.stamp_bytes // HEADER_BYTES) * HEADER_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes of stamp and rows in one."""
        return self.rows_offset + self.row_bytes

    def __str__(self) -> str:
        kind = Kind(self.kind).name.lower() if self.kind in set(Kind) else f"kind {self.kind}"
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return (
            f"{kind}{chunk} from rank {self.source} to rank {self.target} of step {self.step}, microbatch "
            f"{self.microbatch}, plan {self.plan_hash.hex()[:16]}, {self.num_valid} entries, {self.row_bytes} bytes"
        )


def make_header(lane: Lane, stamp: Stamp, num_valid: int, row_bytes: int, source: int, target: int) -> Header:
    """The header that both ends of a transfer expect."""
    plan_hash = stamp.plan_hash[:HASH_BYTES]
    where = int(lane.kind), lane.chunk, plan_hash, stamp.step, stamp.microbatch
    return Header(*where, num_valid, row_bytes, source, target)


def encode(header: Header, valid: Tensor) -> Tensor:
    """The stamp of a message: uint8 [stamp_bytes], with the validity of its items, bool [v], all on the CPU."""
    packed = _HEADER.pack(
        _MAGIC,
        header.kind,
        header.chunk,
        header.plan_hash,
        header.step,
        header.microbatch,
        header.num_valid,
        header.row_bytes,
        header.source,
        header.target,
    )
    return torch.cat([torch.frombuffer(bytearray(packed), dtype=torch.uint8), valid.to(torch.uint8)])


def decode(stamp: Tensor, expected: Header) -> Tensor:
    """What a stamp, uint8 [expected.stamp_bytes] on the CPU, says of the validity of the items: bool [v].

    Raises:
        BrokerMismatchError: the message is another one than the receiver waits for.
    """
    magic, *fields = _HEADER.unpack(stamp[:HEADER_BYTES].numpy().tobytes())
    if magic != _MAGIC:
        raise BrokerMismatchError(
            f"rank {expected.target} got bytes that are no message where it waited for {expected}; all ranks must run "
            "the same release of trainclient"
        )
    found = Header(*fields)
    if found != expected:
        raise BrokerMismatchError(
            f"rank {expected.target} waited for {expected} but got {found}; all ranks must read the same job from "
            "servers of one fleet, and resume from the same checkpoint"
        )
    return stamp[HEADER_BYTES:].bool()


def join(header: Header, valid: Tensor, rows: Tensor) -> Tensor:
    """Stamp and rows [r, width] in one, for collectives: uint8 [message_bytes] on the device of the rows."""
    message = torch.zeros(header.message_bytes, dtype=torch.uint8, device=rows.device)
    message[: header.stamp_bytes].copy_(encode(header, valid))
    message[header.rows_offset :].copy_(rows.reshape(-1).view(torch.uint8))
    return message


def split(message: Tensor, expected: Header, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `join` joined: valid, bool [v] on the CPU, and rows [r, width], a view of the message.

    Raises:
        BrokerMismatchError: as `decode` does.
    """
    valid = decode(message[: expected.stamp_bytes].cpu(), expected)
    return valid, message[expected.rows_offset :].view(dtype).view(-1, width)
