"""Where the payloads of one stream come from: a data connection, memory that its server shares, or chunks."""

import logging

from disttrain.v1.data_service_pb2 import DirectOffer, EndDirectRequest
from grpc import StatusCode

from trainclient.stream.buffers import Buffers
from trainclient.stream.direct import DirectConnection, DirectError
from trainclient.stream.endpoint import CallGuard, Endpoint, MessageStream
from trainclient.stream.errors import CutStreamError, ProtocolError
from trainclient.stream.fleet import Fleet
from trainclient.stream.microbatch import Array, Cursor, TensorTable
from trainclient.stream.receiver import as_tensors, receive_tensors, skip_to_restart
from trainclient.stream.shared_memory import MappedBlocks

MAX_CAUSE_CHARS = 1000

_log = logging.getLogger(__name__)


class Payloads:
    """The payloads of one stream, behind their headers."""

    def __init__(
        self,
        fleet: Fleet,
        endpoint: Endpoint,
        call: MessageStream,
        guard: CallGuard,
        buffers: Buffers,
        mapped: MappedBlocks | None,
    ) -> None:
        """Nothing is offered yet.

        Args:
            fleet: counts what comes over data connections.
            endpoint: the server.
            call: the stream.
            guard: holds the call.
            buffers: where bytes are put.
            mapped: where they may lie already.
        """
        self._fleet = fleet
        self._endpoint = endpoint
        self._call = call
        self._guard = guard
        self._buffers = buffers
        self._mapped = mapped
        self._direct: DirectConnection | None = None

    def connect(self, offer: DirectOffer) -> None:
        """Take up the offer of a data connection, the first one of the stream.

        Raises:
            ProtocolError: it was not asked for, or cannot be taken up.
        """
        if self._mapped is not None or self._direct is not None or len(offer.token) != 16:
            raise ProtocolError("it offered a data connection that nobody asked for, or without a token")
        self._direct = DirectConnection(self._endpoint.address, offer, self._endpoint.tls)

    def began_again(self, cursor: Cursor, *, direct: bool) -> bool:
        """Whether a data connection could not be opened, and the stream begins again at that microbatch for it.

        Args:
            cursor: of the microbatch.
            direct: whether its payload was to come over the data connection.

        Raises:
            CutStreamError: the server has ended the stream already, and the payload is lost; it is to be opened again.
            RpcError: the same, since the stream has failed.
            IdleEndError: the server ended the stream, because nothing was taken.
        """
        if self._direct is None or (error := self._direct.error) is None:
            return False
        if direct:
            self._begin_again(error, cursor)
            return True
        restarted = self._leave(error, cursor)
        if restarted or not self._has_failed():
            self._said(error)
        if restarted:
            skip_to_restart(self._call, cursor)
        return restarted

    def tensors(self, cursor: Cursor, table: TensorTable, *, direct: bool) -> dict[str, Array] | None:
        """The tensors of a microbatch; None where the stream begins again with it.

        Raises:
            ClientError: there are none, or wrong ones; see `receive_tensors`.
        """
        if not direct:
            return receive_tensors(self._call, table, self._buffers, self._mapped)
        if self._direct is None:
            raise ProtocolError("it announced a payload over a data connection, and there is none")
        received = self._buffers.take(table.total_bytes)
        try:
            self._direct.read(cursor, table.crc32c, received, lambda: not self._call.is_active())
        except DirectError as error:
            self._begin_again(error, cursor)
            return None
        return as_tensors(received, table, self._buffers)

    def close(self) -> None:
        """Close what payloads are read from."""
        if self._direct is not None:
            self._direct.close()
        if self._mapped is not None:
            self._mapped.close()

    def _begin_again(self, error: DirectError, cursor: Cursor) -> None:
        """Have the payload that did not come sent again.

        Raises:
            CutStreamError: the server has written all of the stream already; it is to be opened again.
            IdleEndError: it ended the stream, and with it the data connection, because nothing was taken.
        """
        restarted = self._leave(error, cursor)
        if restarted:
            self._said(error)
        try:
            skip_to_restart(self._call, cursor)
        except CutStreamError:
            self._fleet.avoid_direct.add(self._endpoint.address)  # else the next stream may end so again
            if not restarted:
                self._said(error)
            raise

    def _leave(self, error: DirectError, cursor: Cursor) -> bool:
        """Have the server send chunks from that microbatch on; whether the stream begins again for it.

        Raises:
            ClientError: the server does not answer, so it is not the data connection alone; or the reader was closed.
        """
        assert self._direct is not None
        direct, self._direct = self._direct, None
        direct.close()
        if (cause := self._guard.cause()) is not None:
            raise cause
        if not self._call.is_active():  # the stream is over, and its server may be lost: to ask it would take seconds
            return False
        request = EndDirectRequest(
            token=direct.token, step=cursor.step, microbatch=cursor.microbatch, cause=str(error)[:MAX_CAUSE_CHARS]
        )
        timeout_s = self._fleet.timeouts.connect
        answer = self._endpoint.unary(lambda stub: stub.EndDirect, request, timeout_s, self._guard)
        self._guard.hold(self._call)
        return answer.restarted

    def _has_failed(self) -> bool:
        """Whether the stream is over and not in order, so that its reader will not go on with it."""
        return not self._call.is_active() and self._call.code() is not StatusCode.OK

    def _said(self, error: DirectError) -> None:
        self._fleet.direct_fallbacks += 1
        _log.warning(
            "server %s: payloads come over gRPC, since the data connection is of no use: %s",
            self._endpoint.address, error,
        )  # fmt: skip
