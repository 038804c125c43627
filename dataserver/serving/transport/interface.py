"""What a stream asks of a transport: memory to make microbatches in, and the messages that take them to a consumer."""

from dataclasses import dataclass
from typing import Protocol

from dataserver.serving.stream_memory import Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Memory for one microbatch, from the transport that takes it to the consumer."""

    transport: "Transport"
    buffer: Buffer
    """uint8 [capacity]: the memory that the microbatch is prepared in."""
    number: int = -1
    """Number of the block, where the consumer sees it too."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodedMicrobatch:
    """A microbatch ready to be handed out."""

    header: bytes
    """The microbatch's first message, serialized."""
    payload: Buffer
    """uint8 [total_bytes]: the encoded tensors, at the front of the memory of the microbatch."""
    crc32c: int = 0
    """Checksum of the payload, as the header has it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the header and of the payload."""
        return len(self.header) + self.payload.nbytes


class Transport(Protocol):
    """One way to the consumer of one stream. Thread-safe."""

    @property
    def sends_payload(self) -> bool:
        """Whether the payload is sent as bytes. Otherwise the consumer reads it where it was made."""

    def memory(self, num_bytes: int) -> Memory | None:
        """Memory for a microbatch; None if there is none for now.

        Raises:
            MemoryError: the system has none left.
        """

    def give(self, memory: Memory) -> None:
        """Take memory back: the stream is done with it."""

    def wait_until_wanted(self, memory: Memory, timeout_s: float) -> bool:
        """Wait at most so long until the consumer wants this microbatch; whether it does."""

    def num_messages(self, encoded: EncodedMicrobatch) -> int:
        """Number of messages that follow the header."""

    def message(self, memory: Memory, encoded: EncodedMicrobatch, i: int) -> bytes:
        """One of these, counted from 0. Messages are taken in order."""
