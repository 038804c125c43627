"""Pieces of objects that were read ahead of whoever will want them."""

import logging
import threading
from collections import OrderedDict
from concurrent.futures import CancelledError, Future

from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.dataset.storage.pieces import Piece

_log = logging.getLogger(__name__)


class PiecesAhead:
    """Pieces that were read ahead and are not taken yet. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        """Hold up to so many bytes; the oldest pieces go first."""
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._futures: OrderedDict[tuple[str, ObjectInfo, int, int], Future[bytes]] = OrderedDict()
        """By the keys of pieces, oldest first."""
        self._num_bytes = 0

    def has(self, piece: Piece) -> bool:
        """Whether a piece is on its way, or came. What failed is to be read anew."""
        future = self._futures.get(piece.key)
        return future is not None and (not future.done() or _is_here(future))

    def put(self, piece: Piece, future: "Future[bytes]") -> None:
        """Hold what will become a piece; it counts with its full length at once."""
        with self._lock:
            if self._futures.pop(piece.key, None) is None:
                self._num_bytes += piece.length
            self._futures[piece.key] = future
            while self._num_bytes > self._most_bytes:
                (_, _, _, length), _ = self._futures.popitem(last=False)
                self._num_bytes -= length

    def coming(self, piece: Piece) -> "Future[bytes] | None":
        """What is read ahead and is not here: on its way, or failed since it was last read ahead."""
        future = self._futures.get(piece.key)
        return None if future is None or _is_here(future) else future

    def take(self, piece: Piece) -> "Future[bytes] | None":
        """Give what was put for a piece, and hold it no longer."""
        with self._lock:
            future = self._futures.pop(piece.key, None)
            if future is not None:
                self._num_bytes -= piece.length
            return future

    def clear(self) -> None:
        """Drop all pieces; their requests go on, and nobody takes what they read."""
        with self._lock:
            self._futures.clear()
            self._num_bytes = 0


def waited_for(piece: Piece, future: "Future[bytes] | None") -> bytes | None:
    """A piece that was taken, once it is here; None where it was not read ahead, or where that failed."""
    if future is None:
        return None
    error: BaseException | None
    try:
        error = future.exception()
    except CancelledError:
        error = OSError("it was cancelled")
    if not isinstance(error, OSError):
        return future.result()
    _log.debug("%s is read again: %s", piece.info.key, error)  # not raised: its trace would hold what callers hold
    return None


def _is_here(future: "Future[bytes]") -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
