"""A reader over fake servers, for the tests of what it does."""

import threading
from collections.abc import Callable

import numpy as np
from client.fake_server import NUM_STEPS, FakeServer, arrays_of, job_data, num_microbatches

from dataserver.planning.job.identity import Job
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.fleet import Fleet
from trainclient.stream.follower import ViewRequest
from trainclient.stream.jobs import resolve_job
from trainclient.stream.microbatch import Array, Microbatch
from trainclient.stream.reader import MicrobatchReader

Serve = Callable[..., FakeServer]
VIEW = ViewRequest("llm", 1)
ALL = [(step, m) for step in range(NUM_STEPS) for m in range(num_microbatches(step))]


class Opened:
    """A fleet, a job and a reader over servers, closed together."""

    def __init__(self, addresses: list[str], timeouts: Timeouts, view: ViewRequest = VIEW, **options) -> None:
        self.fleet = Fleet(addresses, timeouts=timeouts)
        self.fleet.current = 0
        self.job: Job = resolve_job(job_data(), self.fleet)
        self.reader = MicrobatchReader(self.fleet, self.job, view, num_steps=NUM_STEPS, **options)

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
        self.fleet.close()
        assert not receiving_threads()

    def read_all(self) -> list[tuple[int, int]]:
        """Read to the end, checking every byte; returns the cursors."""
        found = []
        for microbatch in self.reader:
            self.check(microbatch)
            found.append((microbatch.step, microbatch.microbatch))
        return found

    def check(self, microbatch: Microbatch[Array]) -> None:
        expected = arrays_of(self.job.job_id, "llm", 1, microbatch.step, microbatch.microbatch)
        assert microbatch.tensors.keys() <= expected.keys()
        for name, array in microbatch.tensors.items():
            np.testing.assert_array_equal(array, expected[name])


def receiving_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(("reader-", "progress-"))]
