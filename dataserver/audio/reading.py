"""libsndfile behind soundfile: files that are read once, from the first sample on. Imported with the first clip."""

import io
from collections.abc import Iterator

import numpy as np
import soundfile
from numpy.typing import NDArray

_NO_LENGTH = 1 << 62
"""libsndfile gives such lengths to files that do not say theirs."""
_BLOCK = 1 << 14
"""Samples of each channel that are read at once: many channels take no more memory than one."""
ERRORS = (soundfile.SoundFileError, OSError, RuntimeError, TypeError, ValueError)
"""What the library raises for hostile bytes."""


class OpenClip(soundfile.SoundFile):  # type: ignore[misc]  # it has no types
    """A clip that is read in order: soundfile seeks after each read otherwise, which is inexact in MP3, and fails in
    files without a length."""

    def __init__(self, data: bytes, is_counted: bool) -> None:
        super().__init__(io.BytesIO(data))
        self.is_counted = is_counted
        """Whether the length is not the file's own, but of as much of it as is wanted."""

    def seekable(self) -> bool:
        """False, so that nothing seeks."""
        return False

    @property
    def has_length(self) -> bool:
        """Whether the file says how many samples it has."""
        return bool(self.frames < _NO_LENGTH)

    def blocks_of(self, samples: int) -> Iterator[NDArray[np.float32]]:
        """Yield float32 [n, channels] until there are so many samples, or no more."""
        left = samples
        while left > 0:
            part = self.read(out=np.empty((min(_BLOCK, left), self.channels), np.float32))
            if not len(part):
                return
            left -= len(part)
            yield part
