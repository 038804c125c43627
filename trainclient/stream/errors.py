"""What can go wrong between a trainer and its servers, each kind as a type of its own.

Every error says what to do about it, an `ErrorAction` of errors.proto. Servers send it with their errors; the
actions of errors that no server sends are defined here.
"""

import logging
from collections.abc import Mapping

import grpc
from disttrain.v1.errors_pb2 import (
    ERROR_ACTION_ANOTHER_SERVER,
    ERROR_ACTION_GIVE_UP,
    ERROR_ACTION_RETRY,
    ErrorAction,
)
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from dataserver.security import tls_problem, with_hint

DOMAIN = "disttrain"

_log = logging.getLogger(__name__)
_TRANSIENT = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes that gRPC itself makes of a lost or resetting connection, when no ErrorInfo says otherwise."""


class AddressError(ValueError):
    """Server addresses that cannot be used."""


class StateError(ValueError):
    """A checkpointed state that this job cannot continue from."""


class ClientError(RuntimeError):
    """Base of everything that ends a stream."""

    action: ErrorAction.ValueType = ERROR_ACTION_GIVE_UP
    """What to do about it."""


class DataServiceError(ClientError):
    """A server refused a call, or the call did not reach it."""

    def __init__(
        self, server: str, code: grpc.StatusCode, reason: str, message: str, action: ErrorAction.ValueType
    ) -> None:
        what = f"answered {reason}" if reason else f"failed with {code.name}"
        super().__init__(f"server {server} {what}: {message}")
        self.server = server
        self.code = code
        self.reason = reason
        """Name from ErrorReason without its prefix; empty where the status came from gRPC itself."""
        self.message = message
        self.action = action


class ProtocolError(ClientError):
    """A server sent what the protocol does not allow: a defect of one side, which no retry can fix."""


class CorruptDataError(ClientError):
    """The bytes of a microbatch do not match the checksum that the server sent."""

    action = ERROR_ACTION_RETRY


class CutStreamError(ClientError):
    """A stream ended without saying that it ends."""

    action = ERROR_ACTION_RETRY


class DeadlineError(ClientError):
    """A wait for data lasted too long."""

    action = ERROR_ACTION_RETRY


class PlanMismatchError(ClientError):
    """Two microbatches of one step come from different plans; training on them would mix samples up."""


class ServerMismatchError(ClientError):
    """A server would not serve the bytes that this job already used; others of its fleet do."""

    action = ERROR_ACTION_ANOTHER_SERVER


class VersionError(ClientError):
    """A server does not support the versions that the job is pinned to."""

    action = ERROR_ACTION_ANOTHER_SERVER


class FleetError(ClientError):
    """Every server refused, or was tried for as long as allowed."""

    def __init__(self, summary: str, failures: Mapping[str, str]) -> None:
        listed = "; ".join(f"{a}: {text.removeprefix(f'server {a}').lstrip(': ')}" for a, text in failures.items())
        super().__init__(f"{summary}: {listed}")
        self.failures = dict(failures)
        """What went wrong last at each address."""


class ForkError(ClientError):
    """A reader is used in a forked child of the process that opened it."""


class ClosedError(ClientError):
    """A reader is used, or waits, after it was closed."""


def service_error(server: str, error: grpc.RpcError) -> ClientError:
    """The typed form of a failed call.

    Args:
        server: address that was called.
        error: what gRPC raised, which is the call itself.
    """
    if not isinstance(error, grpc.Call):
        return ProtocolError(f"server {server}: gRPC failed without a status: {error!r}")
    code, message = error.code(), error.details() or "no details"
    info = _error_info(error)
    if info is not None:
        return DataServiceError(server, code, info.reason, message, _action(info))
    action = ERROR_ACTION_RETRY if code in _TRANSIENT else ERROR_ACTION_GIVE_UP
    if code is grpc.StatusCode.UNIMPLEMENTED:
        action = ERROR_ACTION_ANOTHER_SERVER
        message = (
            f"it does not speak this client's API, disttrain.v1 ({message}); "
            "point the client at a `dataserver serve` of a matching release"
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        if (problem := tls_problem(message)) is not None:
            return DataServiceError(server, code, "", problem, ERROR_ACTION_ANOTHER_SERVER)
        message = with_hint(message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        message = "it gave no answer in time; is it overloaded, or something else than `dataserver serve`?"
    return DataServiceError(server, code, "", message, action)


def _action(info: ErrorInfo) -> ErrorAction.ValueType:
    """What an ErrorInfo says is to be done; GIVE_UP for anything but the proto's actions."""
    name = f"ERROR_ACTION_{info.metadata.get('action', '')}"
    if name not in ErrorAction.keys():  # noqa: SIM118 (an enum wrapper is no mapping)
        _log.warning("an error with reason %s names the unknown action %r, giving up", info.reason, name)
        return ERROR_ACTION_GIVE_UP
    return ErrorAction.Value(name)


def _error_info(call: grpc.Call) -> ErrorInfo | None:
    """The ErrorInfo of our domain in a status, or None where there is none that can be read."""
    try:
        status = rpc_status.from_call(call)
        for detail in status.details if status is not None else ():
            info = ErrorInfo()
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
                return info
    except (ValueError, DecodeError) as error:
        _log.warning("the details of a status cannot be read, going by its code: %s", error)
    return None
