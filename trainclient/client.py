"""The data client of a trainer: any server addresses in, torch tensors out.

    with DataClient("data-0:50051,data-1:50051", "job.yaml", module="backbone", rank=0) as client:
        for batch in client:
            loss = model(batch.tensors["token_ids"], ...)
            if batch.last_of_step:
                ...  # optimizer step
                checkpoint["data"] = client.state_dict()

Everything but the tensors is in `trainclient.stream`, which does not import torch.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from disttrain.v1.microbatch_pb2 import MicrobatchHeader

from dataserver.extras import pip_install
from dataserver.security import NO_CREDENTIALS, Credentials
from dataserver.tracing import Tracing
from trainclient.stream.buffers import Bytes
from trainclient.stream.client import ViewClient
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.jobs import JobSource
from trainclient.stream.microbatch import Array, Microbatch, read_header, read_table
from trainclient.stream.reader import MAX_MICROBATCH_BYTES, PREFETCH_BYTES

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"trainclient.client gives tensors of torch, which is not installed; run {pip_install('train')}, or read numpy "
        "arrays with ArrayClient of trainclient.stream.client, which takes the same arguments",
        name=error.name,
    ) from None

Batch: TypeAlias = Microbatch[torch.Tensor]
"""A microbatch with torch tensors; they share memory that is used again when none of them is alive."""

_ANY_SIZE = 1 << 62


class DataClient(ViewClient[torch.Tensor]):
    """A client whose tensors are torch's; all else it has from `ViewClient`."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        job: JobSource,
        module: str,
        rank: int,
        *,
        tensors: Sequence[str] | None = None,
        compress: bool = False,
        share_fetch: bool = False,
        pin_memory: bool = False,
        start_step: int | None = None,
        prefetch_bytes: int = PREFETCH_BYTES,
        max_microbatch_bytes: int = MAX_MICROBATCH_BYTES,
        timeouts: Timeouts | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        tracing: Tracing | None = None,
    ) -> None:
        """See `ViewClient`.

        Args:
            addresses, job, module, rank, tensors, compress, share_fetch, start_step, prefetch_bytes,
                max_microbatch_bytes, timeouts, credentials, tracing: see there.
            pin_memory: page-locked memory, so that copies to a GPU may be asynchronous. It is torch's own, which waits
                for copies under way before it is used again.

        Raises:
            ValueError: page-locked memory is asked for where no GPU is; see there.
            ClientError: see there.
        """
        super().__init__(
            addresses,
            job,
            module,
            rank,
            tensors=tensors,
            compress=compress,
            share_fetch=share_fetch,
            start_step=start_step,
            prefetch_bytes=prefetch_bytes,
            max_microbatch_bytes=max_microbatch_bytes,
            timeouts=timeouts,
            credentials=credentials,
            buffers=TorchBuffers(pin_memory=True) if pin_memory else None,
            tracing=tracing,
        )

    @staticmethod
    def _handed_out(microbatch: Microbatch[Array]) -> Batch:
        return as_torch(microbatch)


class TorchBuffers:
    """Memory from torch's own allocators; page-locked memory is recycled there, after the copies from it have ended."""

    def __init__(self, *, pin_memory: bool) -> None:
        """Choose the memory.

        Raises:
            ValueError: page-locked memory is asked for where no GPU is.
        """
        if pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory is set, but torch finds no GPU here: leave it out, or install torch with CUDA")
        self._pin_memory = pin_memory

    def take(self, nbytes: int) -> Bytes:
        """Uint8 [nbytes] over the memory of a torch tensor, which `_tensor` finds again."""
        memory = torch.empty(max(nbytes, 1), dtype=torch.uint8, pin_memory=self._pin_memory)
        array: Bytes = memory.numpy()[:nbytes]
        return array


def as_torch(microbatch: Microbatch[Array]) -> Batch:
    """The same microbatch with torch tensors over the same memory."""
    return microbatch.with_tensors(
        {name: _tensor(array, name in microbatch.bfloat16) for name, array in microbatch.tensors.items()}
    )


def batch_with_room(header: bytes, *, pin_memory: bool) -> Batch:
    """The microbatch of a header that another process has received and checked; its tensors are yet to be filled."""
    parsed = MicrobatchHeader.FromString(header)
    return with_room(read_header(parsed, read_table(parsed, _ANY_SIZE)), pin_memory=pin_memory)


def with_room(microbatch: Microbatch[Any], *, pin_memory: bool) -> Batch:
    """A microbatch with room for its tensors, which another process has received."""
    buffers, table = TorchBuffers(pin_memory=pin_memory), read_table(microbatch.header, _ANY_SIZE)
    arrays = {e.name: buffers.take(e.raw_bytes).view(e.dtype).reshape(e.shape) for e in table.entries}
    return as_torch(microbatch.with_tensors(arrays))


def _tensor(array: Array, bfloat16: bool) -> torch.Tensor:
    """A tensor over an array's memory.

    Over the memory of a torch tensor it is a view of that tensor: only then does torch's allocator of page-locked
    memory learn of asynchronous copies that are still reading when the last reference dies.
    """
    owner = array.base.base if isinstance(array.base, np.ndarray) else None
    if isinstance(owner, torch.Tensor):
        start = array.ctypes.data - owner.data_ptr()
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        tensor = owner[start : start + array.nbytes].view(dtype).view(array.shape)
    else:
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor
