import threading

import pytest

from dataserver.assembly import UnreadableError
from dataserver.dataset.errors import ShardReadError
from dataserver.dataset.storage.client_interface import UnavailableError
from dataserver.serving.metrics import Metrics
from dataserver.serving.stream.assembly import READ_ATTEMPTS, with_retries


class Storage:
    """Fails a given number of times."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.reads = failures, error, 0

    def read(self) -> str:
        self.reads += 1
        if self.reads <= self.failures:
            raise self.error
        return "data"


@pytest.mark.parametrize("error", [ShardReadError("gone"), OSError(5, "gone")])
def test_storage_that_recovers_is_read(error: Exception) -> None:
    storage = Storage(READ_ATTEMPTS - 1, error)
    assert with_retries(storage.read, threading.Event(), Metrics()) == "data"


def test_storage_that_does_not_recover_is_given_up() -> None:
    storage = Storage(99, ShardReadError("gone"))
    with pytest.raises(ShardReadError):
        with_retries(storage.read, threading.Event(), Metrics())
    assert storage.reads == READ_ATTEMPTS


def test_what_a_store_was_asked_for_again_and_again_is_not_asked_for_anew() -> None:
    """Its budget lasts for half a minute: four of them would leave a trainer without a word for two."""
    given_up = UnreadableError("gone", 0, 0)
    given_up.__cause__ = ShardReadError("gone")
    given_up.__cause__.__cause__ = UnavailableError("503; given up")
    for error in (given_up, UnavailableError("503; given up")):
        storage = Storage(99, error)
        with pytest.raises(type(error)):
            with_retries(storage.read, threading.Event(), Metrics())
        assert storage.reads == 1


def test_a_stream_that_ended_does_not_try_again() -> None:
    storage, stop = Storage(99, ShardReadError("gone")), threading.Event()
    stop.set()
    with pytest.raises(ShardReadError):
        with_retries(storage.read, stop, Metrics())
    assert storage.reads == 1


def test_other_errors_are_not_repeated() -> None:
    storage = Storage(99, KeyError("defect"))
    with pytest.raises(KeyError):
        with_retries(storage.read, threading.Event(), Metrics())
    assert storage.reads == 1
