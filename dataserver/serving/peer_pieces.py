"""What this server reads for others of its fleet: pieces of its own datasets, and of nothing else."""

from collections.abc import Iterable
from typing import Final

from crc32c import crc32c as crc32c_of
from disttrain.v1 import errors_pb2
from disttrain.v1.peer_service_pb2 import FetchPiecesRequest, FetchPiecesResponse

from dataserver.dataset import BLOCKS, Dataset, Piece
from dataserver.fleet.pieces import MAX_CALL_BYTES, MAX_PIECE_BYTES
from dataserver.serving.errors import DataServiceError, invalid_request

MAX_PIECES: Final = 1 << 16


def fetch_pieces(datasets: Iterable[Dataset], request: FetchPiecesRequest) -> FetchPiecesResponse:
    """Read pieces for another server.

    Raises:
        DataServiceError: the request is malformed or wants too much, or no dataset has such an object.
        OSError: the store does not give them.
    """
    num_pieces = sum(len(one.start) for one in request.objects)
    num_bytes = sum(sum(one.length) for one in request.objects)
    whole = all(len(one.start) == len(one.length) and all(one.length) for one in request.objects)
    limit = MAX_PIECE_BYTES if num_pieces == 1 else MAX_CALL_BYTES
    if not whole or not 0 < num_pieces <= MAX_PIECES or num_bytes > limit:
        raise invalid_request(
            f"{num_pieces} pieces of {num_bytes} bytes are asked for; as many lengths as starts, none of them 0, and at"
            f" most {MAX_CALL_BYTES} bytes, or one piece of at most {MAX_PIECE_BYTES}, are required",
        )
    known = list(datasets)
    ranges = [list(zip(one.start, one.length, strict=True)) for one in request.objects]
    found = [_found(known, one.object, some) for one, some in zip(request.objects, ranges, strict=True)]
    data = b"".join(BLOCKS.read([piece for some in found for piece in some], for_peer=True))
    return FetchPiecesResponse(data=data, crc32c=crc32c_of(data))


def _found(datasets: Iterable[Dataset], digest: bytes, ranges: list[tuple[int, int]]) -> list[Piece]:
    for dataset in datasets:
        pieces = dataset.pieces(digest, ranges)
        if pieces is not None:
            if len(pieces) != len(ranges):
                raise invalid_request("a piece leaves its object")
            return pieces
    raise DataServiceError(
        errors_pb2.ERROR_REASON_SAMPLE_UNKNOWN, "no dataset here has this version of the object: read it from the store"
    )
