"""The one table of error reasons, and the way from an exception to a gRPC status with google.rpc.ErrorInfo."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn

import grpc
from disttrain.v1 import errors_pb2
from disttrain.v1.errors_pb2 import ErrorAction, ErrorReason
from google.protobuf.any_pb2 import Any as AnyMessage

from dataserver.assembly import TokenCountError, TokenizerError, UnknownTensorError
from dataserver.dataset import (
    CaptionError,
    DatasetError,
    FilterError,
    ShardReadError,
    StaleIndexError,
    TokensMissingError,
)
from dataserver.jobs import (
    DatasetMismatchError,
    DatasetUnknownError,
    StatisticsPendingError,
    TokenizerUnknownError,
    WorkCancelledError,
)
from dataserver.planning.balancing import BinBudgetError
from dataserver.planning.job.identity import JobSpecError, UnknownFieldsError, UnsupportedVersionError
from dataserver.planning.stream.order import DatasetEmptyError, StepOutOfRangeError
from dataserver.planning.stream.sizing import MicrobatchTooLargeError, SampleTooLargeError
from dataserver.transforms import TransformError, TransformUnavailableError

ERROR_DOMAIN = "disttrain"
MAX_TEXT_BYTES = 1500
"""Longest text of an error. It travels twice in HTTP/2 trailers, which gRPC bounds to 8 KiB by default."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """What a reason stands for, permanently."""

    code: grpc.StatusCode
    action: ErrorAction.ValueType


_CODE = grpc.StatusCode
_RETRY = errors_pb2.ERROR_ACTION_RETRY
_ANOTHER_SERVER = errors_pb2.ERROR_ACTION_ANOTHER_SERVER
_CREATE_JOB = errors_pb2.ERROR_ACTION_CREATE_JOB
_GIVE_UP = errors_pb2.ERROR_ACTION_GIVE_UP
ERROR_TABLE: Mapping[ErrorReason.ValueType, ErrorRule] = MappingProxyType(
    {
        errors_pb2.ERROR_REASON_JOB_UNKNOWN: ErrorRule(_CODE.NOT_FOUND, _CREATE_JOB),
        errors_pb2.ERROR_REASON_JOB_INVALID: ErrorRule(_CODE.INVALID_ARGUMENT, _GIVE_UP),
        errors_pb2.ERROR_REASON_VERSION_UNSUPPORTED: ErrorRule(_CODE.FAILED_PRECONDITION, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_DATASET_UNKNOWN: ErrorRule(_CODE.NOT_FOUND, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_DATASET_MISMATCH: ErrorRule(_CODE.FAILED_PRECONDITION, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_TOKENIZER_UNKNOWN: ErrorRule(_CODE.NOT_FOUND, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_TOKENIZER_MISMATCH: ErrorRule(_CODE.FAILED_PRECONDITION, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_TOKENS_NOT_COUNTED: ErrorRule(_CODE.FAILED_PRECONDITION, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_INDEX_STALE: ErrorRule(_CODE.FAILED_PRECONDITION, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_SAMPLE_TOO_LARGE: ErrorRule(_CODE.INVALID_ARGUMENT, _GIVE_UP),
        errors_pb2.ERROR_REASON_DATASET_EMPTY: ErrorRule(_CODE.FAILED_PRECONDITION, _GIVE_UP),
        errors_pb2.ERROR_REASON_MODULE_UNKNOWN: ErrorRule(_CODE.INVALID_ARGUMENT, _GIVE_UP),
        errors_pb2.ERROR_REASON_RANK_OUT_OF_RANGE: ErrorRule(_CODE.OUT_OF_RANGE, _GIVE_UP),
        errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE: ErrorRule(_CODE.OUT_OF_RANGE, _GIVE_UP),
        errors_pb2.ERROR_REASON_TENSOR_UNKNOWN: ErrorRule(_CODE.INVALID_ARGUMENT, _GIVE_UP),
        errors_pb2.ERROR_REASON_REQUEST_INVALID: ErrorRule(_CODE.INVALID_ARGUMENT, _GIVE_UP),
        errors_pb2.ERROR_REASON_TOO_MANY_STREAMS: ErrorRule(_CODE.RESOURCE_EXHAUSTED, _RETRY),
        errors_pb2.ERROR_REASON_DRAINING: ErrorRule(_CODE.UNAVAILABLE, _RETRY),
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE: ErrorRule(_CODE.UNAVAILABLE, _RETRY),
        errors_pb2.ERROR_REASON_INTERNAL: ErrorRule(_CODE.INTERNAL, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_MICROBATCH_TOO_LARGE: ErrorRule(_CODE.RESOURCE_EXHAUSTED, _GIVE_UP),
        errors_pb2.ERROR_REASON_SERVER_LIMIT: ErrorRule(_CODE.RESOURCE_EXHAUSTED, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_TOO_MANY_CALLS: ErrorRule(_CODE.RESOURCE_EXHAUSTED, _RETRY),
        errors_pb2.ERROR_REASON_METHOD_UNKNOWN: ErrorRule(_CODE.UNIMPLEMENTED, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_SAMPLE_UNKNOWN: ErrorRule(_CODE.NOT_FOUND, _GIVE_UP),
        errors_pb2.ERROR_REASON_STATISTICS_PENDING: ErrorRule(_CODE.UNAVAILABLE, _RETRY),
        errors_pb2.ERROR_REASON_UNAUTHENTICATED: ErrorRule(_CODE.UNAUTHENTICATED, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_PERMISSION_DENIED: ErrorRule(_CODE.PERMISSION_DENIED, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_IDENTITY_LIMIT: ErrorRule(_CODE.RESOURCE_EXHAUSTED, _RETRY),
        errors_pb2.ERROR_REASON_TRANSFORM_UNKNOWN: ErrorRule(_CODE.FAILED_PRECONDITION, _ANOTHER_SERVER),
        errors_pb2.ERROR_REASON_TRANSFORM_UNAVAILABLE: ErrorRule(_CODE.UNAVAILABLE, _RETRY),
        errors_pb2.ERROR_REASON_JOB_UNSUPPORTED: ErrorRule(_CODE.FAILED_PRECONDITION, _ANOTHER_SERVER),
    }
)
"""Frozen: clients act on it."""


@dataclass(eq=False)
class DataServiceError(Exception):
    """An error for the client: a reason of the table, and a text that says what to change."""

    reason: ErrorReason.ValueType
    message: str

    def __str__(self) -> str:
        return self.message

    @property
    def rule(self) -> ErrorRule:
        """Status code, and what the client does."""
        return ERROR_TABLE[self.reason]


def invalid_request(message: str) -> DataServiceError:
    """A request that cannot be answered as it is."""
    return DataServiceError(errors_pb2.ERROR_REASON_REQUEST_INVALID, message)


_REASON_OF: Mapping[type[Exception], ErrorReason.ValueType] = MappingProxyType(
    {
        JobSpecError: errors_pb2.ERROR_REASON_JOB_INVALID,
        UnknownFieldsError: errors_pb2.ERROR_REASON_JOB_UNSUPPORTED,
        UnsupportedVersionError: errors_pb2.ERROR_REASON_VERSION_UNSUPPORTED,
        DatasetUnknownError: errors_pb2.ERROR_REASON_DATASET_UNKNOWN,
        DatasetMismatchError: errors_pb2.ERROR_REASON_DATASET_MISMATCH,
        TokenizerUnknownError: errors_pb2.ERROR_REASON_TOKENIZER_UNKNOWN,
        SampleTooLargeError: errors_pb2.ERROR_REASON_SAMPLE_TOO_LARGE,
        BinBudgetError: errors_pb2.ERROR_REASON_MICROBATCH_TOO_LARGE,
        MicrobatchTooLargeError: errors_pb2.ERROR_REASON_MICROBATCH_TOO_LARGE,
        DatasetEmptyError: errors_pb2.ERROR_REASON_DATASET_EMPTY,
        StepOutOfRangeError: errors_pb2.ERROR_REASON_STEP_OUT_OF_RANGE,
        TokenCountError: errors_pb2.ERROR_REASON_TOKENS_NOT_COUNTED,
        TokenizerError: errors_pb2.ERROR_REASON_TOKENIZER_MISMATCH,
        UnknownTensorError: errors_pb2.ERROR_REASON_TENSOR_UNKNOWN,
        DatasetError: errors_pb2.ERROR_REASON_INDEX_STALE,
        StaleIndexError: errors_pb2.ERROR_REASON_INDEX_STALE,
        TokensMissingError: errors_pb2.ERROR_REASON_TOKENS_NOT_COUNTED,
        FilterError: errors_pb2.ERROR_REASON_JOB_INVALID,
        CaptionError: errors_pb2.ERROR_REASON_JOB_INVALID,
        ShardReadError: errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        OSError: errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        StatisticsPendingError: errors_pb2.ERROR_REASON_STATISTICS_PENDING,
        TransformError: errors_pb2.ERROR_REASON_TRANSFORM_UNKNOWN,
        TransformUnavailableError: errors_pb2.ERROR_REASON_TRANSFORM_UNAVAILABLE,
        WorkCancelledError: errors_pb2.ERROR_REASON_INTERNAL,  # for nobody: its client is gone
    }
)


def service_error(error: Exception) -> DataServiceError:
    """What a client is told of an exception; one that no rule covers is logged here and hidden from the client."""
    if isinstance(error, DataServiceError):
        return error
    for kind in type(error).__mro__:
        reason = _REASON_OF.get(kind)
        if reason is not None:
            return DataServiceError(reason, str(error))
    _log.error("request failed by a defect of the server", exc_info=error)
    return DataServiceError(
        errors_pb2.ERROR_REASON_INTERNAL, f"the server failed ({type(error).__name__}); its log has the details"
    )


def load_details() -> None:
    """Load what errors are made of. A server that has no descriptors left can load nothing, and still says why."""
    for module in ("google.rpc.error_details_pb2", "google.rpc.status_pb2", "grpc_status.rpc_status"):
        import_module(module)


def abort(context: grpc.ServicerContext, error: DataServiceError) -> NoReturn:
    """End a call with the error's status, text and ErrorInfo."""
    from google.rpc.error_details_pb2 import ErrorInfo  # importing this module takes long enough without them
    from google.rpc.status_pb2 import Status
    from grpc_status import rpc_status

    rule = error.rule
    info = ErrorInfo(
        reason=ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_"),
        domain=ERROR_DOMAIN,
        metadata={"action": ErrorAction.Name(rule.action).removeprefix("ERROR_ACTION_")},
    )
    detail = AnyMessage()
    detail.Pack(info)
    status = Status(code=rule.code.value[0], message=_cut(error.message), details=[detail])
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status returned")


def _cut(text: str) -> str:
    encoded = text.encode("utf-8", "backslashreplace")
    if len(encoded) <= MAX_TEXT_BYTES:
        return encoded.decode()
    return encoded[: MAX_TEXT_BYTES - 4].decode("utf-8", "ignore") + " ..."
