"""What becomes of every status that a call can end with, and what is to be done about it."""

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from client.fake_server import fail
from disttrain.v1.data_service_pb2 import GetServerInfoRequest
from disttrain.v1.errors_pb2 import ErrorAction

from dataserver.security import Channels
from trainclient.stream import errors
from trainclient.stream.endpoint import CallGuard, Endpoint, Timeouts
from trainclient.stream.errors import ClientError, DataServiceError, ProtocolError, service_error

CODE = grpc.StatusCode
REPEATED = ["UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED", "INTERNAL", "UNKNOWN"]


class Ending:
    """A server whose calls end with `code`, and with `reason` and `action` where there is a reason."""

    def __init__(self) -> None:
        self.code, self.reason, self.action = CODE.UNKNOWN, "", ""
        methods = {"GetServerInfo": grpc.unary_unary_rpc_method_handler(self._end)}
        handler = grpc.method_handlers_generic_handler("disttrain.v1.DataService", methods)
        self._server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[handler])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.endpoint = Endpoint(self.address, Timeouts(), Channels())
        self._server.start()

    def _end(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        if self.reason:
            fail(context, self.code, self.reason, self.action, "so it is")
        context.abort(self.code, "so it is")

    def asked(self) -> ClientError:
        with pytest.raises(ClientError) as raised:
            self.endpoint.unary(lambda stub: stub.GetServerInfo, GetServerInfoRequest(), 30, CallGuard())
        return raised.value

    def close(self) -> None:
        self.endpoint.close()
        self._server.stop(0).wait()


@pytest.fixture
def server() -> Iterator[Ending]:
    server = Ending()
    yield server
    server.close()


def test_a_status_without_details_says_by_its_code_what_to_do(server: Ending) -> None:
    for code in CODE:
        if code is CODE.OK:
            continue
        server.code = code
        error = server.asked()
        assert isinstance(error, DataServiceError)
        assert (error.code, error.reason, error.server) == (code, "", server.address)
        action, message = "RETRY" if code.name in REPEATED else "GIVE_UP", "so it is"
        if code is CODE.UNIMPLEMENTED:
            action = "ANOTHER_SERVER"
            message = (
                "it does not speak this client's API, disttrain.v1 (so it is); "
                "point the client at a `dataserver serve` of a matching release"
            )
        if code is CODE.DEADLINE_EXCEEDED:
            message = "it gave no answer in time; is it overloaded, or something else than `dataserver serve`?"
        assert ErrorAction.Name(error.action) == f"ERROR_ACTION_{action}"
        assert error.message == message
        assert str(error) == f"server {server.address} failed with {code.name}: {message}"


@pytest.mark.parametrize("action", ["RETRY", "ANOTHER_SERVER", "CREATE_JOB", "GIVE_UP"])
def test_details_say_what_to_do_whatever_the_code(server: Ending, action: str) -> None:
    server.reason, server.action = "JOB_UNKNOWN", action
    for server.code in (CODE.UNAVAILABLE, CODE.UNIMPLEMENTED, CODE.DEADLINE_EXCEEDED, CODE.NOT_FOUND):
        error = server.asked()
        assert isinstance(error, DataServiceError)
        assert (error.code, error.reason, error.message) == (server.code, "JOB_UNKNOWN", "so it is")
        assert ErrorAction.Name(error.action) == f"ERROR_ACTION_{action}"
        assert str(error) == f"server {server.address} answered JOB_UNKNOWN: so it is"


def test_an_unknown_action_is_a_warning_and_ends_it(server: Ending, caplog: pytest.LogCaptureFixture) -> None:
    server.code, server.reason, server.action = CODE.UNAVAILABLE, "NEW", "DANCE"
    assert ErrorAction.Name(server.asked().action) == "ERROR_ACTION_GIVE_UP"
    assert caplog.messages == ["an error with reason NEW names the unknown action 'ERROR_ACTION_DANCE', giving up"]


def test_an_error_of_grpc_that_is_no_call() -> None:
    error = service_error("a:1", grpc.RpcError("broken"))
    assert isinstance(error, ProtocolError)
    assert str(error) == "server a:1: gRPC failed without a status: RpcError('broken')"


def test_what_to_do_about_errors_of_this_side() -> None:
    found = {
        name: ErrorAction.Name(kind.action).removeprefix("ERROR_ACTION_")
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, ClientError)
    }
    expected = dict.fromkeys(("CorruptDataError", "CutStreamError", "DeadlineError"), "RETRY")
    expected |= dict.fromkeys(("ServerMismatchError", "VersionError"), "ANOTHER_SERVER")
    assert {name: action for name, action in found.items() if action != "GIVE_UP"} == expected
    assert len(found) > len(expected)


def test_a_call_that_this_side_ended(server: Ending) -> None:
    guard = CallGuard()
    for error, said in ((grpc.FutureCancelledError(), "was cancelled"), (grpc.RpcError("x"), "without a status")):
        assert said in str(server.endpoint.failure(error, guard))
    guard.stop()
    assert str(server.endpoint.failure(grpc.RpcError("x"), guard)) == "the reader was closed"
