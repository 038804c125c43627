"""Follows one view of a job from server to server, and checks that it is one and the same job everywhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
from disttrain.v1.data_service_pb2 import DirectOffer, EndOfStream, GetServerInfoResponse, StreamMicrobatchesRequest
from disttrain.v1.errors_pb2 import ERROR_ACTION_CREATE_JOB
from disttrain.v1.microbatch_pb2 import CODEC_ZSTD

from dataserver.planning.job.identity import Job
from dataserver.tracing import Kind, StepTraces, opened
from trainclient.stream.buffers import BufferPool, Buffers
from trainclient.stream.endpoint import CallGuard, Endpoint
from trainclient.stream.errors import (
    ClientError,
    ClosedError,
    CorruptDataError,
    CutStreamError,
    DataServiceError,
    PlanMismatchError,
    ProtocolError,
)
from trainclient.stream.fleet import Fleet
from trainclient.stream.handoff import Handoff
from trainclient.stream.microbatch import Array, Cursor, Microbatch, read_header, read_table
from trainclient.stream.payloads import Payloads
from trainclient.stream.progress import ProgressReports
from trainclient.stream.receiver import Head, IdleEndError, receive_head
from trainclient.stream.rotation import Rotation
from trainclient.stream.shared_memory import MappedBlocks

_VIDEO_GRID: Final = 3
"""Columns of the grids of videos, one more than those of images."""


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """The view that a rank asks for."""

    module: str
    """Name of the module in the job."""
    rank: int
    """Data-parallel rank within the module."""
    tensors: tuple[str, ...] = ()
    """Names of the tensors wanted; empty for all."""
    compress: bool = False
    """Whether the server may compress tensors; worth it only where the network is the limit."""
    share_fetch: bool = False
    """Whether ranks that share sequences share one fetch: microbatches of the others are withheld."""


@dataclass(frozen=True, slots=True)
class _StepInHand:
    """What all microbatches of a step must agree on, and which server said so first."""

    step: int
    plan: tuple[bytes, int, int, int]
    server: str


class Follower:
    """Receives microbatches in order and leaves them in a handoff; `run` is the body of a thread."""

    def __init__(
        self,
        fleet: Fleet,
        job: Job,
        view: ViewRequest,
        *,
        num_steps: int,
        start: Cursor,
        max_bytes: int,
        buffers: Buffers | None,
        prefetch_bytes: int,
        handoff: Handoff,
        shown: Callable[[Microbatch[Array]], Microbatch[Any]],
        guard: CallGuard,
        progress: ProgressReports,
        traces: StepTraces | None,
    ) -> None:
        self._fleet = fleet
        self._job = job
        self._view = view
        self._num_steps = num_steps
        self._cursor = start
        self._max_bytes = max_bytes
        self._buffers = buffers or BufferPool(prefetch_bytes)
        self._shared_stays = buffers is None
        self._shared_bytes = prefetch_bytes
        self._handoff = handoff
        self._shown = shown
        self._guard = guard
        self._progress = progress
        self._traces = traces
        self._metadata = None if traces is None else traces.metadata
        self._in_hand: _StepInHand | None = None

    def run(self) -> None:
        """Follow the view to the end of the job; whatever ends it earlier is raised where the caller waits."""
        try:
            self._follow()
        except ClosedError:
            self._handoff.finish(None)
        except Exception as error:
            self._handoff.finish(error)
        else:
            self._handoff.finish(None)

    def _follow(self) -> None:
        rotation = Rotation(self._fleet, self._guard)
        idle_at: Cursor | None = None
        while self._cursor.step < self._num_steps:
            try:
                end = self._stream(rotation)
            except ClientError as error:
                if self._cursor.step < self._num_steps:
                    rotation.failed(error)
            else:
                if end.reason == EndOfStream.REASON_DRAINING:
                    rotation.drained()
                elif self._cursor == idle_at:
                    server = rotation.endpoint.address
                    rotation.failed(CutStreamError(f"server {server}: it ended two streams as idle at {idle_at}"))
                else:
                    idle_at = self._cursor
                    self._handoff.await_caller()  # then the same server may go on

    def _stream(self, rotation: Rotation) -> EndOfStream:
        """Read one server's stream to its end, bringing the server the job where it does not know it."""
        endpoint = rotation.endpoint
        info = self._fleet.check(endpoint, self._guard, self._job)
        try:
            return self._read(endpoint, rotation, info)
        except DataServiceError as error:
            if error.action != ERROR_ACTION_CREATE_JOB:
                raise
        self._handoff.stop_clock()  # to size a large dataset takes longer than any microbatch
        self._fleet.forget(endpoint)
        self._fleet.bring(endpoint, self._job, self._guard)
        info = self._fleet.check(endpoint, self._guard, self._job)
        return self._read(endpoint, rotation, info)

    def _read(self, endpoint: Endpoint, rotation: Rotation, info: GetServerInfoResponse) -> EndOfStream:
        mapped = self._mapped_blocks(info)
        self._handoff.when_emptied(None if mapped is None else mapped.ask)
        request = self._request(endpoint, mapped, self._progress.begin_stream(endpoint))
        call = endpoint.stream(request, self._guard, self._metadata)
        payloads = Payloads(self._fleet, endpoint, call, self._guard, self._buffers, mapped)
        self._handoff.restart_clock()
        try:
            while True:
                head = receive_head(call)
                if isinstance(head, EndOfStream):
                    self._check_end(head)
                    return head
                if isinstance(head, DirectOffer):
                    payloads.connect(head)
                    continue
                if payloads.began_again(self._cursor, direct=head.direct):
                    continue
                microbatch = self._receive(head, payloads, mapped, endpoint.address)
                if microbatch is None:
                    continue
                self._fleet.commit(endpoint, info, _media_of(microbatch))
                self._cursor = microbatch.cursor.after(microbatch.num_microbatches)
                self._handoff.put(self._shown(microbatch))
                rotation.succeeded()
        except IdleEndError as idle:
            return idle.end
        except grpc.RpcError as error:
            raise endpoint.failure(error, self._guard) from None
        except (ProtocolError, CorruptDataError, CutStreamError) as error:
            raise type(error)(f"server {endpoint.address}: {error}") from None
        finally:
            call.cancel()
            self._progress.end_stream()
            payloads.close()

    def _mapped_blocks(self, info: GetServerInfoResponse) -> MappedBlocks | None:
        """Memory that the server shares, if it is at hand; what is compressed is meant for a network."""
        if self._view.compress:
            return None
        return MappedBlocks.of(info.memory_socket, self._shared_bytes, stays=self._shared_stays)

    def _receive(
        self, head: Head, payloads: Payloads, mapped: MappedBlocks | None, server: str
    ) -> Microbatch[Array] | None:
        """The next microbatch; None where the stream begins again with it."""
        table = read_table(head.header, self._max_bytes)
        microbatch = read_header(head.header, table)
        self._check(microbatch, server)
        self._handoff.admit(microbatch.nbytes)
        if mapped is not None:
            mapped.say()  # here, so that the caller need not
        if microbatch.withheld:
            if not self._view.share_fetch:
                raise ProtocolError("it withheld the tensors of a microbatch that this client shares with no other")
            return microbatch
        cursor = microbatch.cursor
        parent = None if self._traces is None else self._traces.of_wait(cursor.step, cursor.microbatch)
        with opened(parent, "receive", Kind.CLIENT, bytes=microbatch.nbytes, server=server):
            tensors = payloads.tensors(cursor, table, direct=head.direct)
        return None if tensors is None else microbatch.with_tensors(tensors)

    def _request(
        self, endpoint: Endpoint, mapped: MappedBlocks | None, progress_token: bytes
    ) -> StreamMicrobatchesRequest:
        avoided = endpoint.address in self._fleet.avoid_direct
        self._fleet.avoid_direct.discard(endpoint.address)
        return StreamMicrobatchesRequest(
            job_id=self._job.job_id,
            module=self._view.module,
            rank=self._view.rank,
            start_step=self._cursor.step,
            start_microbatch=self._cursor.microbatch,
            tensors=self._view.tensors,
            accepted_codecs=[CODEC_ZSTD] if self._view.compress else [],
            share_fetch=self._view.share_fetch,
            memory_token=b"" if mapped is None else mapped.token,
            progress_token=progress_token,
            direct=mapped is None and not avoided,
        )

    def _check(self, microbatch: Microbatch[Array], server: str) -> None:
        """Compare a header with the job, the cursor, and the step's other microbatches."""
        found = (microbatch.job_id, microbatch.stream_id, microbatch.content_version)
        wanted = (self._job.job_id, self._job.stream_id, self._job.stream.content_version)
        if found != wanted:
            raise ProtocolError(f"it sent a microbatch of (job, stream, content version) {found}, asked was {wanted}")
        if microbatch.cursor != self._cursor:
            raise ProtocolError(f"it sent {microbatch.cursor}, the next one is {self._cursor}")
        plan = (
            microbatch.plan_hash,
            microbatch.num_microbatches,
            microbatch.text_tokens,
            microbatch.target_patches,
        )
        known = self._in_hand
        if known is None or known.step != microbatch.step:
            self._in_hand = _StepInHand(microbatch.step, plan, server)
        elif known.plan != plan:
            raise PlanMismatchError(
                f"server {server} plans step {microbatch.step} as {plan[0].hex()} with {plan[1]} microbatches, server "
                f"{known.server} as {known.plan[0].hex()} with {known.plan[1]}; all views of a step must come from one "
                "plan: run the same release on all servers, and start again from the last checkpoint"
            )

    def _check_end(self, end: EndOfStream) -> None:
        """An end of the job must be where the job ends: training must not stop early without anyone noticing."""
        if end.reason in (EndOfStream.REASON_DRAINING, EndOfStream.REASON_IDLE):
            return
        if end.reason != EndOfStream.REASON_END_OF_JOB:
            raise ProtocolError(f"it ended the stream for the unknown reason {end.reason}")
        if self._cursor != Cursor(self._num_steps):
            raise ProtocolError(f"it ended the job before {self._cursor}; the job has {self._num_steps} steps")


def _media_of(microbatch: Microbatch[Any]) -> str:
    """The modality whose libraries made some of a view; empty of images and text."""
    if "mel" in microbatch.tensors:
        return "audio"
    grid = microbatch.tensors.get("grid")
    return "video" if grid is not None and grid.shape[1:] == (_VIDEO_GRID,) else ""
