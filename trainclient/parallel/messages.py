"""The bytes of a message between modules: a header of 64 bytes, valid bytes, rows.

    header | valid: uint8 [v] | padding to a multiple of 64 | rows: [r, width] of the model's dtype

The receiver knows v, r and width from its own view; the header proves that the sender means the same.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

HEADER_BYTES = 64
HASH_BYTES = 24
"""Of the plan hash that a header carries: enough to tell plans apart."""
_MAGIC = b"DTB1"
_HEADER = struct.Struct("<4sI24sQIIQII")
"""Magic, kind, plan hash, step, microbatch, valid bytes, row bytes, source rank, target rank."""


class Kind(IntEnum):
    """What the rows are."""

    EMBEDDINGS = 1
    ACTIVATIONS = 2
    CONDITIONS = 3
    EMBEDDING_GRADIENTS = 4
    ACTIVATION_GRADIENTS = 5
    CONDITION_GRADIENTS = 6


class BrokerMismatchError(RuntimeError):
    """Two ranks that should run the same microbatch of the same plan do not."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The microbatch that a message belongs to."""

    plan_hash: bytes
    step: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself."""

    kind: int
    plan_hash: bytes
    step: int
    microbatch: int
    num_valid: int
    row_bytes: int
    source: int
    target: int

    @property
    def rows_offset(self) -> int:
        """First byte of the rows."""
        return HEADER_BYTES + -(-self.num_valid // HEADER_BYTES) * HEADER_BYTES

    @property
    def message_bytes(self) -> int:
        """Bytes of the whole message."""
        return self.rows_offset + self.row_bytes

    def __str__(self) -> str:
        kind = Kind(self.kind).name.lower() if self.kind in set(Kind) else f"kind {self.kind}"
        return (
            f"{kind} from rank {self.source} to rank {self.target} of step {self.step}, microbatch {self.microbatch}, "
            f"plan {self.plan_hash.hex()[:16]}, {self.num_valid} entries, {self.row_bytes} bytes"
        )


def make_header(kind: Kind, stamp: Stamp, num_valid: int, row_bytes: int, source: int, target: int) -> Header:
    """The header that both ends of a transfer expect."""
    plan_hash = stamp.plan_hash[:HASH_BYTES]
    return Header(int(kind), plan_hash, stamp.step, stamp.microbatch, num_valid, row_bytes, source, target)


def encode(header: Header, valid: Tensor, rows: Tensor) -> Tensor:
    """Put a message together.

    Args:
        header: describes the other two.
        valid: bool [v], on any device.
        rows: [r, width], contiguous, on the device of the transfer.

    Returns:
        uint8 [message_bytes] on the device of `rows`.
    """
    message = torch.zeros(header.message_bytes, dtype=torch.uint8, device=rows.device)
    packed = _HEADER.pack(
        _MAGIC,
        header.kind,
        header.plan_hash,
        header.step,
        header.microbatch,
        header.num_valid,
        header.row_bytes,
        header.source,
        header.target,
    )
    head = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    message[:HEADER_BYTES].copy_(head)
    message[HEADER_BYTES : HEADER_BYTES + header.num_valid].copy_(valid)
    message[header.rows_offset :].copy_(rows.reshape(-1).view(torch.uint8))
    return message


def decode(message: Tensor, expected: Header, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Take a message apart.

    Args:
        message: uint8 [expected.message_bytes].
        expected: what the receiver waits for.
        width: of a row.
        dtype: of the rows.

    Returns:
        valid: bool [v] on the CPU, and rows [r, width], a view of the message.

    Raises:
        BrokerMismatchError: the header is another one.
    """
    head = bytes(message[:HEADER_BYTES].cpu().numpy())
    magic, *fields = _HEADER.unpack(head)
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
    valid = message[HEADER_BYTES : HEADER_BYTES + found.num_valid].cpu().bool()
    return valid, message[found.rows_offset :].view(dtype).view(-1, width)
