"""What all streams of a server share."""

import threading
from concurrent.futures import Executor
from dataclasses import dataclass

from dataserver.serving.metrics import Metrics
from dataserver.serving.stream.fair_pool import FairPool
from dataserver.serving.stream_memory import BufferPool, ByteBudget
from dataserver.serving.transport.direct_listener import DirectListener
from dataserver.serving.transport.shared_memory_listener import SharedMemoryListener


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """What all streams of a server share."""

    stream_bytes: int
    """Largest microbatch, in bytes, that a stream may have."""
    ahead_bytes: int
    """A stream that has so many bytes of microbatches ahead begins no further one."""
    budget: ByteBudget
    buffers: BufferPool
    planning: Executor
    """Gets plans, in a thread for each stream: one whose job is queued keeps no other from planning."""
    laying_out: FairPool
    """Reads token ids and lays out views, and gives the rest to `decoding`. Both have a group for each job, and in it a
    queue for each stream: while several jobs wait, one that opens many streams gets no more turns than the others."""
    decoding: FairPool
    """Decodes images. It has threads of its own, so that a new stream's views need not wait for images."""
    shared_memory: SharedMemoryListener
    direct: DirectListener
    draining: threading.Event
    """Set when streams are to end after the microbatch in hand."""
    metrics: Metrics
