# ruff: noqa: N802 (methods are named by the proto)
"""The methods of `PeerService`: plans and pieces of shards for other servers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc
from disttrain.v1 import errors_pb2
from disttrain.v1 import peer_service_pb2 as pb

from dataserver.fleet.build import build_id
from dataserver.fleet.compact_message import compact_message
from dataserver.fleet.peer import MAX_PLAN_BYTES
from dataserver.jobs import IsCancelled, SingleFlightCache
from dataserver.serving.access import Access
from dataserver.serving.errors import DataServiceError
from dataserver.serving.peer_pieces import fetch_pieces
from dataserver.serving.registry import JobRegistry
from dataserver.tracing import Kind, Recorder, Span, incoming, opened

ANSWER_BYTES: Final = 16 << 20
"""Most bytes of answers kept ready: all servers of a fleet ask for a plan within a short time."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _Answer:
    message: pb.FetchPlanResponse


class PeerService:
    """Answers the other servers of the fleet; see peer_service.proto."""

    def __init__(
        self,
        access: Access,
        jobs: JobRegistry,
        instance: bytes,
        draining: Callable[[], bool],
        recorder: Recorder | None,
    ) -> None:
        """Make the service.

        Args:
            access: knows the callers.
            jobs: the jobs that this server knows.
            instance: names this process.
            draining: whether the server ends.
            recorder: takes spans; None where nobody wants any.
        """
        self._access = access
        self._jobs = jobs
        self._instance = instance
        self._draining = draining
        self._recorder = recorder
        self._answers = SingleFlightCache[tuple[str, int], _Answer](
            ANSWER_BYTES, lambda answer: answer.message.ByteSize()
        )

    def Greet(self, _request: pb.GreetRequest, _: grpc.ServicerContext) -> pb.GreetResponse:
        """Tell a peer who this server is."""
        return pb.GreetResponse(instance=self._instance, build=build_id(), draining=self._draining())

    def FetchPieces(self, request: pb.FetchPiecesRequest, context: grpc.ServicerContext) -> pb.FetchPiecesResponse:
        """Hand out pieces of shards, from blocks that this server holds, or from the store."""
        with self._span(context, "give pieces"):
            return fetch_pieces(self._access.catalog(context).datasets.values(), request)

    def FetchPlan(self, request: pb.FetchPlanRequest, context: grpc.ServicerContext) -> pb.FetchPlanResponse:
        """Hand out the plan of a step, made here and never fetched for it."""
        served = self._jobs.get(request.job_id, self._access.catalog(context))
        _check_build(request.build)

        def made(cancelled: IsCancelled) -> _Answer:
            plan = served.planner.plan_here(request.step, cancelled)
            return _Answer(compact_message(served.job, plan, build_id()))

        key = request.job_id, request.step
        with self._span(context, "give plan", step=request.step):
            message = self._answers.get(key, made, lambda: not context.is_active()).message
        _check_size(message, request.step)
        return message

    def _span(self, context: grpc.ServicerContext, name: str, **attributes: int) -> Span:
        """What is done for a peer that is traced."""
        return opened(incoming(self._recorder, context.invocation_metadata()), name, Kind.SERVER, **attributes)


def _check_build(build: str) -> None:
    if build != build_id():
        raise DataServiceError(
            errors_pb2.ERROR_REASON_VERSION_UNSUPPORTED,
            f"build {build[:64]!r} asks for a plan, and this server is build {build_id()}: install the same release "
            "on all servers of the fleet",
        )


def _check_size(message: pb.FetchPlanResponse, step: int) -> None:
    if message.ByteSize() > MAX_PLAN_BYTES:
        raise DataServiceError(
            errors_pb2.ERROR_REASON_SERVER_LIMIT,
            f"the plan of step {step} takes {message.ByteSize()} bytes, more than the {MAX_PLAN_BYTES} that servers "
            "send each other: it is planned by each",
        )
