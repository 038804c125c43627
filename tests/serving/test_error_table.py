import re
from pathlib import Path

import grpc
import pytest
from disttrain.v1 import errors_pb2
from disttrain.v1.errors_pb2 import ErrorAction, ErrorReason

from dataserver.dataset.errors import DatasetError, FilterError, ShardReadError, StaleIndexError, TokensMissingError
from dataserver.planning.balancing import BinBudgetError
from dataserver.planning.job.identity import JobSpecError, UnknownFieldsError, UnsupportedVersionError
from dataserver.planning.layouts.contrastive.limits import TowerMemoryError
from dataserver.planning.plan.arranging import WaveTooLargeError
from dataserver.planning.stream.sizing import SampleTooLargeError
from dataserver.serving.errors import ERROR_TABLE, service_error

FROZEN = {
    "JOB_UNKNOWN": ("NOT_FOUND", "CREATE_JOB"),
    "JOB_INVALID": ("INVALID_ARGUMENT", "GIVE_UP"),
    "VERSION_UNSUPPORTED": ("FAILED_PRECONDITION", "ANOTHER_SERVER"),
    "DATASET_UNKNOWN": ("NOT_FOUND", "ANOTHER_SERVER"),
    "DATASET_MISMATCH": ("FAILED_PRECONDITION", "ANOTHER_SERVER"),
    "TOKENIZER_UNKNOWN": ("NOT_FOUND", "ANOTHER_SERVER"),
    "TOKENIZER_MISMATCH": ("FAILED_PRECONDITION", "ANOTHER_SERVER"),
    "TOKENS_NOT_COUNTED": ("FAILED_PRECONDITION", "ANOTHER_SERVER"),
    "INDEX_STALE": ("FAILED_PRECONDITION", "ANOTHER_SERVER"),
    "SAMPLE_TOO_LARGE": ("INVALID_ARGUMENT", "GIVE_UP"),
    "DATASET_EMPTY": ("FAILED_PRECONDITION", "GIVE_UP"),
    "MODULE_UNKNOWN": ("INVALID_ARGUMENT", "GIVE_UP"),
    "RANK_OUT_OF_RANGE": ("OUT_OF_RANGE", "GIVE_UP"),
    "STEP_OUT_OF_RANGE": ("OUT_OF_RANGE", "GIVE_UP"),
    "TENSOR_UNKNOWN": ("INVALID_ARGUMENT", "GIVE_UP"),
    "REQUEST_INVALID": ("INVALID_ARGUMENT", "GIVE_UP"),
    "TOO_MANY_STREAMS": ("RESOURCE_EXHAUSTED", "RETRY"),
    "DRAINING": ("UNAVAILABLE", "RETRY"),
    "STATISTICS_PENDING": ("UNAVAILABLE", "RETRY"),
    "STORAGE_UNAVAILABLE": ("UNAVAILABLE", "RETRY"),
    "INTERNAL": ("INTERNAL", "ANOTHER_SERVER"),
    "UNAUTHENTICATED": ("UNAUTHENTICATED", "ANOTHER_SERVER"),
    "PERMISSION_DENIED": ("PERMISSION_DENIED", "ANOTHER_SERVER"),
    "IDENTITY_LIMIT": ("RESOURCE_EXHAUSTED", "RETRY"),
    "TRANSFORM_UNKNOWN": ("FAILED_PRECONDITION", "ANOTHER_SERVER"),
    "TRANSFORM_UNAVAILABLE": ("UNAVAILABLE", "RETRY"),
    "MICROBATCH_TOO_LARGE": ("RESOURCE_EXHAUSTED", "GIVE_UP"),
    "SERVER_LIMIT": ("RESOURCE_EXHAUSTED", "ANOTHER_SERVER"),
    "TOO_MANY_CALLS": ("RESOURCE_EXHAUSTED", "RETRY"),
    "METHOD_UNKNOWN": ("UNIMPLEMENTED", "ANOTHER_SERVER"),
    "SAMPLE_UNKNOWN": ("NOT_FOUND", "GIVE_UP"),
    "JOB_UNSUPPORTED": ("FAILED_PRECONDITION", "ANOTHER_SERVER"),
}
"""Clients in the field act on this table: entries may be added, never changed."""

PROTO = Path(__file__).resolve().parents[2] / "protos" / "disttrain" / "v1" / "errors.proto"


def found() -> dict[str, tuple[str, str]]:
    """The table of the server, by names without their prefixes."""
    return {
        ErrorReason.Name(reason).removeprefix("ERROR_REASON_"): (
            rule.code.name,
            ErrorAction.Name(rule.action).removeprefix("ERROR_ACTION_"),
        )
        for reason, rule in ERROR_TABLE.items()
    }


def test_the_table_is_frozen() -> None:
    assert found() == FROZEN


def test_every_reason_has_a_code_and_an_action() -> None:
    assert set(ERROR_TABLE) == set(ErrorReason.values()) - {errors_pb2.ERROR_REASON_UNSPECIFIED}
    assert all(rule.action != errors_pb2.ERROR_ACTION_UNSPECIFIED for rule in ERROR_TABLE.values())
    assert {rule.action for rule in ERROR_TABLE.values()} == set(ErrorAction.values()) - {0}, "each action is of use"


def test_the_comments_of_the_proto_name_code_and_action() -> None:
    """People who write a client have nothing else."""
    pattern = r"  // ([A-Z_]+), ([A-Z_]+): (?:.*\n  // )*.*\n  ERROR_REASON_(\w+) = \d+;"
    assert {name: (code, action) for code, action, name in re.findall(pattern, PROTO.read_text())} == FROZEN


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (JobSpecError("x"), "JOB_INVALID"),
        (UnknownFieldsError("x"), "JOB_UNSUPPORTED"),
        (UnsupportedVersionError("x"), "VERSION_UNSUPPORTED"),
        (StaleIndexError("x"), "INDEX_STALE"),
        (DatasetError("x"), "INDEX_STALE"),
        (TokensMissingError("x"), "TOKENS_NOT_COUNTED"),
        (FilterError("x"), "JOB_INVALID"),
        (ShardReadError("x"), "STORAGE_UNAVAILABLE"),
        (OSError(5, "x"), "STORAGE_UNAVAILABLE"),
        (SampleTooLargeError("x"), "SAMPLE_TOO_LARGE"),
        (WaveTooLargeError("x"), "MICROBATCH_TOO_LARGE"),
        (BinBudgetError("x"), "MICROBATCH_TOO_LARGE"),
        (TowerMemoryError("x"), "MICROBATCH_TOO_LARGE"),
    ],
)
def test_exceptions_map_to_reasons_and_keep_their_text(error: Exception, reason: str) -> None:
    told = service_error(error)
    assert told.reason == ErrorReason.Value(f"ERROR_REASON_{reason}")
    assert told.message == str(error)


def test_an_unexpected_exception_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    told = service_error(KeyError("/secret/path"))
    assert told.rule.code is grpc.StatusCode.INTERNAL
    assert "secret" not in told.message
    assert "/secret/path" in caplog.text
