"""The Ray cluster that commands use: connecting to it, and tasks on its nodes."""

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, Final, Literal, TextIO, TypeVar, cast

from dataserver.addresses import split_address
from dataserver.extras import pip_install
from dataserver.fleet.on_ray import NAMESPACE

RETRIES: Final = 3
"""How often a task is done again whose node was lost; it may leave nothing half done."""
CONNECT_S: Final = 10.0
"""Seconds in which the head of a cluster must take a connection."""
Task = TypeVar("Task")
Result = TypeVar("Result")


class RayError(ValueError):
    """Ray, or its cluster, cannot do what is asked for."""


@contextmanager
def connected() -> Iterator[Any]:
    """The package, connected to the cluster that runs on this machine or that RAY_ADDRESS names.

    Raises:
        RayError: it is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise RayError(f"{error}: Ray is not installed; run {pip_install('ray')}") from None
    _check_named_cluster()
    with results_alone():
        try:
            ray.init("auto", namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RayError(
                f"no Ray cluster can be reached ({_first_line(error)}); start one with `ray start --head`, or name one "
                "in RAY_ADDRESS"
            ) from None
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def results_alone() -> Iterator[None]:
    """Leave standard output to this thread, whose results others read; what other threads print goes to standard error.

    A thread of Ray prints what happens to the cluster, such as a node that is lost, whatever `log_to_driver` says.
    """
    with redirect_stdout(cast("TextIO", _OutputOfOneThread())):
        yield


class _OutputOfOneThread:
    """Standard output for the thread that made this, and standard error for all others."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._stdout = sys.stdout

    @property
    def _stream(self) -> TextIO:
        return self._stdout if threading.get_ident() == self._thread else sys.stderr

    def write(self, text: str) -> int:
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class RayTasks:
    """Shares out work over the cluster's nodes, one core for each task."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.num_workers = int(ray.cluster_resources().get("CPU", 0))
        """Cores of the cluster."""
        if self.num_workers < 1:
            raise RayError("the Ray cluster has no CPUs; add a node that has, as with `ray start --num-cpus 8`")

    def run(
        self, work: Callable[[Task], Result], tasks: Sequence[Task], num_workers: int
    ) -> Iterator[tuple[int, Result]]:
        """Yield the position of each task and what `work` made of it, as they are done; see `in_processes`."""
        remote = self._ray.remote(num_cpus=1, max_retries=RETRIES)(work)
        left = iter(enumerate(tasks))
        pending: dict[Any, int] = {}
        while True:
            while len(pending) < num_workers and (following := next(left, None)) is not None:
                pending[remote.remote(following[1])] = following[0]
            if not pending:
                return
            done, _ = self._ray.wait(list(pending), num_returns=1)
            yield pending.pop(done[0]), self._get(done[0])

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None  # what the work raised, without Ray's report of where
        except self._ray.exceptions.RayError as error:
            raise RayError(f"a task was lost with its node {RETRIES + 1} times: {_first_line(error)}") from None


@contextmanager
def tasks_of(engine: Literal["local", "ray"]) -> Iterator[RayTasks | None]:
    """The engine that `--engine` names; None for this machine alone."""
    if engine == "local":
        yield None
        return
    with connected() as ray:
        yield RayTasks(ray)


def _check_named_cluster() -> None:
    """Raise a RayError where nobody listens at RAY_ADDRESS: there Ray itself would end this process."""
    named = os.environ.get("RAY_ADDRESS", "auto")
    if named == "auto" or "://" in named:
        return
    try:
        socket.create_connection(split_address(named, "RAY_ADDRESS"), CONNECT_S).close()
    except OSError as error:
        raise RayError(
            f"no Ray cluster can be reached at RAY_ADDRESS {named} ({error}); is its head running?"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:300]
