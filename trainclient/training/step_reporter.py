"""Step times for the servers, sent beside training."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Self

from dataserver.planning.simulation import OperationKind
from trainclient.client import DataClient
from trainclient.program.clock import Stopwatch
from trainclient.program.interpreter import StepRecord
from trainclient.topology.process_grid import GridProcess
from trainclient.training.streams import Streams


class StepReporter:
    """Sends each step's times of a module from a thread. While a report is under way the next ones are skipped."""

    def __init__(self, client: DataClient, process: GridProcess, module: str) -> None:
        """Report a module of a process, through the client of its views."""
        self._client = client
        self._module = module
        self._stage = process.stage
        self._chunks = [i for i, chunk in enumerate(process.chunks) if chunk.module.name == module]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="step-times")
        self._under_way: Future[bool] | None = None

    def report(self, record: StepRecord, seconds: float, clock: Stopwatch) -> None:
        """Send the times of a step. Only the training thread calls this, so `_under_way` needs no lock."""
        forward_ns, backward_ns = (
            clock.nanoseconds(kind, self._chunks) for kind in (OperationKind.FORWARD, OperationKind.BACKWARD)
        )
        if self._under_way is not None and not self._under_way.done():
            return
        self._under_way = self._pool.submit(
            self._client.report_step_times,
            record.step,
            step_time_s=seconds,
            data_wait_s=record.seen[self._module].data_wait_s,
            stage=self._stage,
            forward_ns=forward_ns,
            backward_ns=backward_ns,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)  # the client closes after this, with no call under way


def open_reporters(streams: Streams, process: GridProcess, entered: ExitStack) -> list[StepReporter]:
    """One for each module of a process; of those that work on the same views the first one reports."""
    if not process.is_leader:
        return []
    return [entered.enter_context(StepReporter(c, process, module)) for module, c in streams.clients.items()]
