"""The jobs whose steps a page may show: the one of a file, or those that a server serves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Protocol

from dataserver.dataset import printable
from dataserver.jobs import JOB_CHARS, JobPlanner
from dataserver.web.server import Query, RequestError
from dataserver.web.visitors import MayRead

MAX_JOBS: Final = 256
"""Most jobs that are listed."""


@dataclass(frozen=True, slots=True)
class PickedJob:
    """A job that may be shown to who asked for it."""

    key: str
    """Key that tells the job from others."""
    opened: JobPlanner | None
    """Its planner, if it is there."""
    open: Callable[[], JobPlanner]
    """Gives the planner, which may take long. Raises RequestError."""


class Jobs(Protocol):
    """Jobs, as far as who asks may see them. Thread-safe."""

    def listed(self, query: Query) -> dict[str, Any]:
        """The jobs that a page may choose from; none where there is no choice."""

    def pick(self, query: Query) -> PickedJob:
        """The job that a request names, if it may be shown. Raises RequestError."""


class FileJob:
    """The job of a file, over datasets of this machine."""

    def __init__(
        self, open_planner: Callable[[], JobPlanner], names: Sequence[str], check: Callable[[str], object]
    ) -> None:
        """Show a job as far as its datasets may be shown.

        Args:
            open_planner: makes the planner of the job.
            names: of the job's datasets; before all of them may be shown, nothing of the job is, not even what is wrong
                with it.
            check: raises RequestError for a dataset that may not be shown; called from any thread.
        """
        self._open, self._names, self._may_be_shown = open_planner, tuple(names), check
        self._opened: JobPlanner | None = None
        """Set by the thread that works things out, and by no other."""

    def listed(self, _query: Query) -> dict[str, Any]:
        """None: there is no choice."""
        self._check()
        return {"jobs": []}

    def pick(self, _query: Query) -> PickedJob:
        """The job that a query picks."""
        self._check()
        return PickedJob("", self._opened, self.planner)

    def _check(self) -> None:
        opened = () if self._opened is None else self._opened.job.spec.stream.datasets
        for name in (*self._names, *(dataset.name for dataset in opened)):
            self._may_be_shown(name)

    def planner(self) -> JobPlanner:
        """Its planner; for one thread.

        Raises:
            RequestError: a dataset may not be shown, or the job cannot be opened.
        """
        self._check()
        if self._opened is None:
            try:
                self._opened = self._open()
            except ValueError as error:  # which says what is wrong with the job, or with a file that it names
                raise RequestError(str(error)) from None
            self._check()
        return self._opened


class ServedJobs:
    """The jobs that a server knows since clients brought them."""

    def __init__(self, known: Callable[[], Iterable[JobPlanner]], may_read: MayRead | None) -> None:
        """Show jobs.

        Args:
            known: the planners of the server's jobs.
            may_read: of who asks, called in the thread that answers; None where all may be shown.
        """
        self._known, self._may_read = known, may_read

    def listed(self, _query: Query) -> dict[str, Any]:
        """The jobs all of whose datasets may be shown."""
        found = [
            {
                "job": planner.job.job_id,
                "layout": planner.job.spec.execution.layout.kind,
                "datasets": [printable(dataset.name, 64) for dataset in planner.job.stream.datasets],
                "first_step": planner.first_step,
                "num_steps": planner.num_steps,
            }
            for planner in self._shown()[:MAX_JOBS]
        ]
        return {"jobs": found}

    def pick(self, query: Query) -> PickedJob:
        """The job of an id, or the first one where none is named."""
        shown, wanted = self._shown(), query.get("job", "")
        if not shown and not wanted:
            raise RequestError(
                "this server knows no job that may be shown to you; trainers bring theirs when they connect",
                HTTPStatus.NOT_FOUND,
            )
        found = next((planner for planner in shown if wanted in ("", planner.job.job_id)), None)
        if found is not None:
            return PickedJob(found.job.job_id, found, lambda: found)
        raise RequestError(
            f"this server knows no job {printable(wanted, JOB_CHARS)!r}, or no longer: trainers bring it again",
            HTTPStatus.NOT_FOUND,
        )

    def _shown(self) -> list[JobPlanner]:
        """In an order that stays while jobs come and go."""
        may_read = self._may_read
        found = [
            planner
            for planner in self._known()
            if may_read is None or all(may_read(dataset.name) for dataset in planner.job.stream.datasets)
        ]
        return sorted(found, key=lambda planner: planner.job.job_id)


class NoJobs:
    """Where no job is named."""

    def listed(self, _query: Query) -> dict[str, Any]:
        """No job, since none is named."""
        return {"jobs": []}

    def pick(self, _query: Query) -> PickedJob:
        """Say how to name one."""
        raise RequestError("no job is named: start dataserver web with --job FILE", HTTPStatus.NOT_FOUND)
