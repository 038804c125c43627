"""The header of a message between modules: 64 bytes, then one byte for the validity of each item.

Headers travel between the CPUs, beside the rows. The receiver knows both sizes from its own view; the header proves
that the sender means the same microbatch while the rows are still on their way. Features of a contrastive batch travel
in one message with their header.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

HEADER_BYTES = 64
HASH_BYTES = 24
"""Leading bytes of the plan hash in a header: enough to tell plans apart."""
_MAGIC = b"DTB2"
_HEADER = struct.Struct("<4sHH24sQIIQII")
"""Magic, kind, chunk, plan hash, step, microbatch, valid bytes, row bytes, source rank, target rank."""


class Kind(IntEnum):
    """What the rows of a message are."""

    EMBEDDINGS = 1
    ACTIVATIONS = 2
    CONDITIONS = 3
    EMBEDDING_GRADIENTS = 4
    ACTIVATION_GRADIENTS = 5
    CONDITION_GRADIENTS = 6
    FEATURES = 7
    """Features of the samples of a contrastive batch, whose number replaces the microbatch's."""
    NORMALISERS = 8
    """Sums over the scores of these features."""


class BrokerMismatchError(RuntimeError):
    """Two ranks that should run the same microbatch of the same plan do not."""


@dataclass(frozen=True, slots=True)
class MicrobatchId:
    """The microbatch that a message belongs to."""

    plan_hash: bytes
    step: int
    microbatch: int


GRADIENT_KINDS: Final[Mapping[Kind, Kind]] = MappingProxyType(
    {
        Kind.EMBEDDINGS: Kind.EMBEDDING_GRADIENTS,
        Kind.ACTIVATIONS: Kind.ACTIVATION_GRADIENTS,
        Kind.CONDITIONS: Kind.CONDITION_GRADIENTS,
    }
)
"""What comes back for each kind of rows."""


@dataclass(frozen=True, slots=True)
class MessageType:
    """What the messages of one direction of an edge carry."""

    kind: Kind
    chunk: int = 0
    """Number of the chunk that sends in the forward pass, between chunks of one module; 0 between modules."""


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """The fields of an encoded header."""

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
    def encoded_bytes(self) -> int:
        """Bytes of the header with the validity of the items."""
        return HEADER_BYTES + self.num_valid

    @property
    def rows_offset(self) -> int:
        """Offset of the rows where they follow their header."""
        return -(-self.encoded_bytes // HEADER_BYTES) * HEADER_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes of header and rows in one message."""
        return self.rows_offset + self.row_bytes

    def __str__(self) -> str:
        kind = Kind(self.kind).name.lower() if self.kind in set(Kind) else f"kind {self.kind}"
        chunk = f" of chunk {self.chunk}" if self.chunk else ""
        return (
            f"{kind}{chunk} from rank {self.source} to rank {self.target} of step {self.step}, microbatch "
            f"{self.microbatch}, plan {self.plan_hash.hex()[:16]}, {self.num_valid} entries, {self.row_bytes} bytes"
        )


def make_header(
    message_type: MessageType, microbatch_id: MicrobatchId, num_valid: int, row_bytes: int, source: int, target: int
) -> MessageHeader:
    """The header that both ends of a transfer expect."""
    plan_hash = microbatch_id.plan_hash[:HASH_BYTES]
    where = int(message_type.kind), message_type.chunk, plan_hash, microbatch_id.step, microbatch_id.microbatch
    return MessageHeader(*where, num_valid, row_bytes, source, target)


def encode(header: MessageHeader, valid: Tensor) -> Tensor:
    """Encode a header and the validity of its items, bool [v]: uint8 [encoded_bytes], all on the CPU."""
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


def decode(encoded: Tensor, expected: MessageHeader) -> Tensor:
    """What an encoded header, uint8 [expected.encoded_bytes] on the CPU, says of the validity of the items: bool [v].

    Raises:
        BrokerMismatchError: the message is another one than the receiver waits for.
    """
    magic, *fields = _HEADER.unpack(encoded[:HEADER_BYTES].numpy().tobytes())
    if magic != _MAGIC:
        raise BrokerMismatchError(
            f"rank {expected.target} got bytes that are no message where it waited for {expected}; all ranks must run "
            "the same release of trainclient"
        )
    found = MessageHeader(*fields)
    if found != expected:
        raise BrokerMismatchError(
            f"rank {expected.target} waited for {expected} but got {found}; all ranks must read the same job from "
            "servers of one fleet, and resume from the same checkpoint"
        )
    return encoded[HEADER_BYTES:].bool()


def join(header: MessageHeader, valid: Tensor, rows: Tensor) -> Tensor:
    """Header and rows [r, width] in one message, for collectives: uint8 [message_bytes] on the device of the rows."""
    message = torch.zeros(header.message_bytes, dtype=torch.uint8, device=rows.device)
    message[: header.encoded_bytes].copy_(encode(header, valid))
    message[header.rows_offset :].copy_(rows.reshape(-1).view(torch.uint8))
    return message


def split(message: Tensor, expected: MessageHeader, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What `join` joined: valid, bool [v] on the CPU, and rows [r, width], a view of the message.

    Raises:
        BrokerMismatchError: as `decode` does.
    """
    valid = decode(message[: expected.encoded_bytes].cpu(), expected)
    return valid, message[expected.rows_offset :].view(dtype).view(-1, width)
