"""What files of known size that are read at any offset have in common."""

import io


class SeekableFile(io.RawIOBase):
    """A file whose `readinto` reads from `_at` on, and moves it."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._at = 0
        """Where the next byte comes from."""

    def readable(self) -> bool:
        """True: bytes are read at any offset."""
        return True

    def seekable(self) -> bool:
        """True: bytes are read at any offset."""
        return True

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another offset; nothing is read yet."""
        self._at = max(0, offset + (0, self._at, self._num_bytes)[whence])
        return self._at
