import grpc
import pytest
from disttrain.v1 import errors_pb2
from disttrain.v1.errors_pb2 import ErrorReason

from dataserver.dataset.errors import DatasetError, FilterError, ShardReadError, StaleIndexError, TokensMissingError
from dataserver.planning.arranging import WaveTooLargeError
from dataserver.planning.balancing import BinRoomError
from dataserver.planning.contrastive.limits import TowerMemoryError
from dataserver.planning.identity import JobSpecError, UnsupportedVersionError
from dataserver.planning.sizing import SampleTooLargeError
from dataserver.serving.errors import ERROR_TABLE, service_error

FROZEN = {
    "JOB_UNKNOWN": ("NOT_FOUND", True),
    "JOB_INVALID": ("INVALID_ARGUMENT", False),
    "VERSION_UNSUPPORTED": ("FAILED_PRECONDITION", False),
    "DATASET_UNKNOWN": ("NOT_FOUND", False),
    "DATASET_MISMATCH": ("FAILED_PRECONDITION", False),
    "TOKENIZER_UNKNOWN": ("NOT_FOUND", False),
    "TOKENIZER_MISMATCH": ("FAILED_PRECONDITION", False),
    "TOKENS_NOT_COUNTED": ("FAILED_PRECONDITION", False),
    "INDEX_STALE": ("FAILED_PRECONDITION", False),
    "SAMPLE_TOO_LARGE": ("INVALID_ARGUMENT", False),
    "DATASET_EMPTY": ("FAILED_PRECONDITION", False),
    "MODULE_UNKNOWN": ("INVALID_ARGUMENT", False),
    "RANK_OUT_OF_RANGE": ("OUT_OF_RANGE", False),
    "STEP_OUT_OF_RANGE": ("OUT_OF_RANGE", False),
    "TENSOR_UNKNOWN": ("INVALID_ARGUMENT", False),
    "REQUEST_INVALID": ("INVALID_ARGUMENT", False),
    "TOO_MANY_STREAMS": ("RESOURCE_EXHAUSTED", True),
    "DRAINING": ("UNAVAILABLE", True),
    "STORAGE_UNAVAILABLE": ("UNAVAILABLE", True),
    "INTERNAL": ("INTERNAL", False),
    "MICROBATCH_TOO_LARGE": ("RESOURCE_EXHAUSTED", False),
}
"""Clients in the field decide by this table what to repeat: entries may be added, never changed."""


def test_the_table_is_frozen() -> None:
    found = {
        ErrorReason.Name(reason).removeprefix("ERROR_REASON_"): (rule.code.name, rule.retriable)
        for reason, rule in ERROR_TABLE.items()
    }
    assert found == FROZEN


def test_every_reason_has_a_rule_that_agrees_with_its_comment_in_the_proto() -> None:
    assert set(ERROR_TABLE) == set(ErrorReason.values()) - {errors_pb2.ERROR_REASON_UNSPECIFIED}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (JobSpecError("x"), "JOB_INVALID"),
        (UnsupportedVersionError("x"), "VERSION_UNSUPPORTED"),
        (StaleIndexError("x"), "INDEX_STALE"),
        (DatasetError("x"), "INDEX_STALE"),
        (TokensMissingError("x"), "TOKENS_NOT_COUNTED"),
        (FilterError("x"), "JOB_INVALID"),
        (ShardReadError("x"), "STORAGE_UNAVAILABLE"),
        (OSError(5, "x"), "STORAGE_UNAVAILABLE"),
        (SampleTooLargeError("x"), "SAMPLE_TOO_LARGE"),
        (WaveTooLargeError("x"), "MICROBATCH_TOO_LARGE"),
        (BinRoomError("x"), "MICROBATCH_TOO_LARGE"),
        (TowerMemoryError("x"), "MICROBATCH_TOO_LARGE"),
    ],
)
def test_exceptions_map_to_reasons_and_keep_their_text(error: Exception, reason: str) -> None:
    found = service_error(error)
    assert found.reason == ErrorReason.Value(f"ERROR_REASON_{reason}")
    assert found.message == str(error)


def test_an_unexpected_exception_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    found = service_error(KeyError("/secret/path"))
    assert found.rule.code is grpc.StatusCode.INTERNAL
    assert "secret" not in found.message
    assert "/secret/path" in caplog.text
