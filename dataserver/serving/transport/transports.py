"""The transports of one stream. Each microbatch takes the best one that has memory for it."""

from dataserver.serving.stream_memory import BufferPool, ByteBudget
from dataserver.serving.transport.grpc import GrpcTransport
from dataserver.serving.transport.interface import Memory
from dataserver.serving.transport.shared_memory_listener import SharedMemoryListener


class Transports:
    """Memory for the microbatches of one stream, on one account. Thread-safe."""

    def __init__(
        self, budget: ByteBudget, buffers: BufferPool, listener: SharedMemoryListener, memory_token: bytes
    ) -> None:
        """Open the account of a stream.

        Args:
            budget: shared by all streams.
            buffers: of all streams.
            listener: knows the clients on this machine.
            memory_token: from a consumer that maps memory instead of receiving bytes; else empty.
        """
        self._account = budget.open()
        self._grpc = GrpcTransport(self._account, buffers)
        self._shared = listener.transport(memory_token, self._account, buffers)

    @property
    def shares(self) -> bool:
        """Whether the consumer maps memory."""
        return self._shared is not None

    def reserve(self, num_bytes: int) -> bool:
        """Reserve memory for one microbatch until the stream is closed; False where there is none left."""
        return self._grpc.reserve(num_bytes)

    def memory(self, num_bytes: int) -> Memory | None:
        """Memory for a microbatch; None if there is none for now.

        Raises:
            MemoryError: the system has none left.
        """
        shared = None if self._shared is None else self._shared.memory(num_bytes)
        return shared or self._grpc.memory(num_bytes)

    def close(self) -> None:
        """Leave the sharing of memory. What is still in use is taken back afterwards."""
        if self._shared is not None:
            self._shared.close()
        self._account.close()
