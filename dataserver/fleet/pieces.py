"""Pieces of shards from the servers that own their blocks: a cache, which the store stands behind."""

import errno
import hashlib
import threading
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any, Final

import grpc
from crc32c import crc32c as crc32c_of
from disttrain.v1.peer_service_pb2 import FetchPiecesRequest, FetchPiecesResponse, ObjectPieces

from dataserver.dataset import BlockKey, Piece
from dataserver.fleet.fetching import FETCH_S, FailedError, awaited, begun, failure_of, leave_alone
from dataserver.fleet.membership import Peers
from dataserver.fleet.peer import MAX_PLAN_BYTES, Peer
from dataserver.fleet.plan_source import PlanSource
from dataserver.jobs import never_cancelled
from dataserver.tracing import Kind, outgoing, span

PIECES: Final = "pieces"
"""Stands for a job where a peer is set aside for pieces alone."""
MAX_CALL_BYTES: Final = 16 << 20
"""Bytes of the pieces of one call; a larger piece has a call of its own."""
MAX_PIECE_BYTES: Final = MAX_PLAN_BYTES - 1024
"""Largest piece: what a message between servers may have, less what wraps it. Larger ones are read from the store."""
REMEMBERED_S: Final = 1.0
"""An owner is looked up anew after so long."""


class PieceFetcher:
    """Asks the owners of blocks for pieces. Fulfils `Owners`; thread-safe."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._lock = threading.Lock()
        self._known: dict[BlockKey, Peer | None] = {}
        self._known_since = 0.0

    def owner(self, key: BlockKey) -> Peer | None:
        """Return who owns a block; None where this server does."""
        now = monotonic()
        with self._lock:
            if now > self._known_since + REMEMBERED_S:
                self._known.clear()
                self._known_since = now
            if key in self._known:
                return self._known[key]
        digest, number = key.object_digest, key.number.to_bytes(8, "little")
        found, *_ = self._peers.ranked_by(lambda i: hashlib.sha256(i + digest + number).digest(), PIECES, digest.hex())
        with self._lock:
            self._known[key] = found
        return found

    def fetch(self, owner: Any, pieces: Sequence[Piece]) -> list[bytes]:
        """Return pieces from the owner of their blocks. Raises OSError where it does not give them all."""
        if (largest := max(piece.length for piece in pieces)) > MAX_PIECE_BYTES:
            raise OSError(errno.EFBIG, f"a piece has {largest} bytes, and peers give {MAX_PIECE_BYTES} at most")
        found: list[bytes] = []
        for some in _calls(pieces):
            try:
                with span("fetch pieces", Kind.CLIENT, peer=owner.address, pieces=len(some)):
                    found += _asked(owner, some)
            except FailedError as failure:
                unknown = failure.source is PlanSource.REFUSED
                name = some[0].blocks[0].object_digest.hex() if unknown else PIECES
                leave_alone(self._peers, owner, failure, name, f"pieces of {some[0].info.key}", "the store is read")
                with self._lock:
                    self._known.clear()
                raise OSError(errno.EIO, f"peer {owner.address}: {failure}") from None
        return found


def _asked(peer: Peer, pieces: Sequence[Piece]) -> list[bytes]:
    request = FetchPiecesRequest()
    for piece in pieces:
        digest = piece.blocks[0].object_digest
        if not request.objects or request.objects[-1].object != digest:
            request.objects.append(ObjectPieces(object=digest))
        request.objects[-1].start.append(piece.start)
        request.objects[-1].length.append(piece.length)
    call = begun(lambda: peer.plans.FetchPieces.future(request, timeout=FETCH_S, metadata=outgoing()))
    try:
        answer: FetchPiecesResponse = awaited(call, peer, monotonic() + FETCH_S, never_cancelled)
    except grpc.RpcError as error:
        raise failure_of(error) from None
    finally:
        call.cancel()
    data = answer.data
    if len(data) != sum(piece.length for piece in pieces) or crc32c_of(data) != answer.crc32c:
        raise FailedError(PlanSource.WRONG, f"it sent {len(data)} bytes that are not those that were asked for")
    found, start = [], 0
    for piece in pieces:
        found.append(data[start : start + piece.length])
        start += piece.length
    return found


def _calls(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield pieces that are asked for together."""
    some: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        if some and num_bytes + piece.length > MAX_CALL_BYTES:
            yield some
            some, num_bytes = [], 0
        some.append(piece)
        num_bytes += piece.length
    if some:
        yield some
