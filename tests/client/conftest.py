"""Fixtures of the client's tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from client.fake_server import Answers, FakeServer

from trainclient.stream.endpoint import Timeouts

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    """Start servers of scripted behaviour in this process."""
    with ExitStack() as stack:
        yield lambda **answers: stack.enter_context(FakeServer(Answers(**answers)))


@pytest.fixture
def patient() -> Timeouts:
    """Deadlines that a busy machine meets, for tests that wait for none."""
    return Timeouts(connect=10.0, first_answer=30.0, call=30.0, stall=30.0, give_up=30.0)


@pytest.fixture
def quick() -> Timeouts:
    """Deadlines short enough for a test that waits for one."""
    return Timeouts(connect=1.0, first_answer=3.0, call=10.0, stall=2.0, give_up=3.0)


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a program text in a new interpreter, from the repository's root."""

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
        return subprocess.run(
            [sys.executable, "-c", program, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
