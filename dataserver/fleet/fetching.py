"""Plans from the servers that own them. Whatever a peer does, the caller gets a right plan, or plans itself."""

import hashlib
import logging
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

import grpc
from disttrain.v1.peer_service_pb2 import FetchPlanRequest, FetchPlanResponse

from dataserver.dataset import printable
from dataserver.fleet.build import build_id
from dataserver.fleet.compact_message import plan_from_message
from dataserver.fleet.membership import Peers
from dataserver.fleet.peer import Peer
from dataserver.fleet.plan_source import PlanSource
from dataserver.jobs import JOB_CHARS, IsCancelled, JobPlanner, WorkCancelledError
from dataserver.planning.plan.compact import UnfitPlanError
from dataserver.planning.plan.plan import StepPlan
from dataserver.tracing import Kind, outgoing, span

FETCH_S: Final = 10.0
"""The longest that a plan is waited for. It is asked for while the steps before it are consumed, so that ordinarily no
stream waits; the largest take some seconds to make, and a few times that on a busy machine. An owner that has stopped
is noticed sooner, by its silence."""
ASIDE_S: Final = 30.0
"""Time for which a peer that was late or could not answer is not asked again: a defect costs one wait in that time."""
CHECK_ONE_IN: Final = 64
"""One plan in so many is made again by the server that would own it next, and compared."""
LOOK_S: Final = 0.05
"""Time between two looks at whether a caller still waits, and its peer is still there."""

STATUS_DETAILS: Final = "grpc-status-details-bin"
"""Metadata of every error that a server of ours answers, and none that gRPC makes: one that answers so is not
silent."""
MAX_REASON_CHARS: Final = 400
CLOSED: Final = "the connection was closed"

Answer = TypeVar("Answer")
Begun = TypeVar("Begun")
_log = logging.getLogger(__name__)


class FailedError(Exception):
    """A peer gave no answer, or a wrong one."""

    def __init__(self, source: PlanSource, why: str) -> None:
        super().__init__(printable(why, MAX_REASON_CHARS))  # a peer may have chosen it
        self.source = source


class PlanFetcher:
    """Asks the owners of steps for their plans."""

    def __init__(self, peers: Peers, count: Callable[[PlanSource], object]) -> None:
        """Ask nobody yet.

        Args:
            peers: the other servers.
            count: told where each plan comes from.
        """
        self._peers = peers
        self._count = count

    def fetch(self, planner: JobPlanner, step: int, cancelled: IsCancelled) -> StepPlan | None:
        """The plan of a step from its owner; None where it is for this server to make.

        Raises:
            WorkCancelledError: nobody waits for it any more.
        """
        job_id = planner.job.job_id
        owner, *others = self._peers.ranked(job_id, step)
        if owner is None:
            self._count(PlanSource.OWN)
            return None
        try:
            with span("fetch plan", Kind.CLIENT, step=step, peer=owner.address):
                plan = self._asked(owner, planner, step, cancelled)
            if others[0] is None and is_checked(job_id, step):
                _compare(plan, planner.plan_here(step, cancelled))
        except FailedError as failure:
            self._act(owner, failure, job_id, step)
            return None
        self._count(PlanSource.FETCHED)
        return plan

    def _asked(self, peer: Peer, planner: JobPlanner, step: int, cancelled: IsCancelled) -> StepPlan:
        job, until = planner.job, monotonic() + FETCH_S
        request = FetchPlanRequest(job_id=job.job_id, step=step, build=build_id())
        try:
            message = _fetched(peer, request, until, cancelled)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise failure_of(error) from None
            message = self._brought(peer, planner, request, until, cancelled)
        try:
            return planner.scheduled(
                lambda: plan_from_message(job, step, planner.samples(step), build_id(), message), cancelled
            )
        except UnfitPlanError as error:
            raise FailedError(PlanSource.WRONG, str(error)) from error

    def _brought(
        self, peer: Peer, planner: JobPlanner, request: FetchPlanRequest, until: float, cancelled: IsCancelled
    ) -> FetchPlanResponse:
        """Make the job known to a peer that does not know it, and ask again."""
        call, since = begun(lambda: peer.bring(planner.job))
        try:
            awaited(call, peer, min(until, since + FETCH_S), cancelled)
            return _fetched(peer, request, until, cancelled)
        except grpc.RpcError as error:
            raise failure_of(error) from None

    def _act(self, peer: Peer, failure: FailedError, job_id: str, step: int) -> None:
        """Count a failure, say so, and keep from asking that peer again too soon."""
        self._count(failure.source)
        what = f"plan of step {step} of job {job_id[:JOB_CHARS]}"
        of_job = failure.source is PlanSource.REFUSED
        leave_alone(self._peers, peer, failure, job_id if of_job else "", what, "planned here")


def leave_alone(peers: Peers, peer: Peer, failure: FailedError, name: str, what: str, instead: str) -> None:
    """Say why a peer gave no answer, and keep from asking it again too soon.

    Args:
        peers: all of them.
        peer: the one that failed.
        failure: how.
        name: the job whose plans it is not asked for meanwhile; all jobs where empty.
        what: what it did not give.
        instead: what is done about it.
    """
    if failure.source is PlanSource.UNREACHABLE:
        peers.lost(peer, str(failure))
        return
    if failure.source is PlanSource.WRONG:
        again = "it is not asked again until it is restarted"
        peer.distrust()
    else:
        again = f"it is asked again in {ASIDE_S:.0f} s"
        peer.set_aside(ASIDE_S, name)
    _log.warning("peer %s gave no %s (%s): %s; %s, and %s", peer.address, what, failure.source, failure, instead, again)


def is_checked(job_id: str, step: int) -> bool:
    """Whether the plan of a step is made again by the server that is next to its owner."""
    word = hashlib.sha256(f"check {job_id} {step}".encode()).digest()[:8]
    return int.from_bytes(word, "little") % CHECK_ONE_IN == 0


def _compare(fetched: StepPlan, made: StepPlan) -> None:
    if fetched.hash != made.hash:
        raise FailedError(
            PlanSource.WRONG, f"it has plan {fetched.hash.hex()}, and this server makes {made.hash.hex()}"
        )


def _fetched(peer: Peer, request: FetchPlanRequest, until: float, cancelled: IsCancelled) -> FetchPlanResponse:
    call = begun(lambda: peer.plans.FetchPlan.future(request, timeout=FETCH_S, metadata=outgoing()))
    try:
        return awaited(call, peer, until, cancelled)
    finally:
        call.cancel()


def begun(begin: Callable[[], Begun]) -> Begun:
    """Begin a call. Raises FailedError where the peer's address left the fleet meanwhile, which closes its channel."""
    try:
        return begin()
    except ValueError:
        raise FailedError(PlanSource.UNREACHABLE, CLOSED) from None


def awaited(call: "grpc.Future[Answer]", peer: Peer, until: float, cancelled: IsCancelled) -> Answer:
    """What a call answers.

    Raises:
        WorkCancelledError: nobody waits for it any more.
        RpcError: it failed.
        FailedError: it did not answer in time, or its peer fell silent.
    """
    while True:
        try:
            return call.result(LOOK_S)
        except grpc.FutureTimeoutError:
            if cancelled():
                raise WorkCancelledError from None
            check_waiting(peer, until)
        except grpc.FutureCancelledError:
            raise FailedError(PlanSource.UNREACHABLE, CLOSED) from None


def check_waiting(peer: Peer, until: float) -> None:
    """Raise FailedError if a peer that has not answered yet fell silent, or is late."""
    if peer.said is None:
        raise FailedError(PlanSource.UNREACHABLE, "it fell silent") from None
    if monotonic() >= until:
        raise FailedError(PlanSource.LATE, f"no answer within {FETCH_S:.0f} s") from None


def failure_of(error: grpc.RpcError) -> FailedError:
    """What the error of a call to a peer means."""
    code, text = error.code(), f"{error.code().name}: {error.details()}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return FailedError(PlanSource.LATE, f"no answer within {FETCH_S:.0f} s")
    answered = any(item.key == STATUS_DETAILS for item in error.trailing_metadata() or ())
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) and not answered:
        return FailedError(PlanSource.UNREACHABLE, text)
    return FailedError(PlanSource.REFUSED, text)
