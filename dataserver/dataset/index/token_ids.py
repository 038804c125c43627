"""The token ids of one shard, read sample by sample."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as crc32c_of

from dataserver.dataset.errors import ShardReadError, TokensMissingError
from dataserver.dataset.index.tokens import I32, TokenCounts
from dataserver.dataset.storage.local import Descriptor

_CHECKED_BYTES: Final = 1 << 20
"""Bytes that are read at a time while the checksum is computed."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """The ids of all texts of a shard, whose checksum is that of the counts."""

    file: Descriptor
    path: Path
    ends: npt.NDArray[np.int64]
    """int64 [texts + 1]: tokens before each text."""
    id_type: np.dtype[np.integer[npt.NBitBase]]
    are_chats: bool = False
    """Whether each text is a conversation, as `chat_tokens` stores them."""

    @classmethod
    def open(cls, path: Path, counts: TokenCounts) -> "TokenIds":
        """Open the file and compare it with its checksum, which reads all of it once.

        Raises:
            TokensMissingError: it is not there, or is another one.
            ShardReadError: storage failed.
        """
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.counts, dtype=np.int64)])
        try:
            found = cls(Descriptor(path), path, ends, counts.id_type, counts.chats is not None)
            size, crc = os.fstat(found.file.number).st_size, 0
            for offset in range(0, size, _CHECKED_BYTES):
                crc = crc32c_of(os.pread(found.file.number, _CHECKED_BYTES, offset), crc)
        except FileNotFoundError:
            raise TokensMissingError(f"the token ids {path} are not there; {_REMEDY}") from None
        except OSError as error:
            raise ShardReadError(f"cannot read {path}: {error}; check the storage") from error
        if (size, crc) != (int(ends[-1]) * counts.id_type.itemsize, counts.ids_crc32c):
            raise TokensMissingError(f"the token ids {path} are not those that were counted; {_REMEDY}")
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes that the ids take in memory."""
        return self.ends.nbytes

    def texts(self, first: int, end: int) -> tuple[I32, ...]:
        """Return int32 [tokens] of each of the texts from `first` to before `end`.

        Raises:
            ShardReadError: storage failed.
        """
        ends = self.ends[first : end + 1]
        begin, size = int(ends[0]), self.id_type.itemsize
        length = (int(ends[-1]) - begin) * size
        try:
            data = os.pread(self.file.number, length, begin * size)
        except OSError as error:
            raise ShardReadError(f"cannot read {self.path}: {error}; check the storage") from error
        if len(data) != length:
            raise ShardReadError(f"{self.path} gave {len(data)} of {length} bytes; was it cut? {_REMEDY}")
        ids = np.frombuffer(data, self.id_type).astype(np.int32)
        return tuple(ids[a - begin : b - begin] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


_REMEDY: Final = "remove the shard's .tokens files and run dataserver index with --tokenizer again"
