"""One step of one process: the operations of its stage, in the order that the planner's simulator scored."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import assert_never

import numpy as np
from torch.profiler import record_function

from dataserver.planning.job.spec import Execution
from dataserver.planning.simulation import Operation, OperationKind
from trainclient.client import Batch
from trainclient.exchange.view_broadcast import Batches
from trainclient.exchange.view_groups import SharedSequences
from trainclient.program.clock import Clock
from trainclient.program.parameters import WHOLE_PARAMETERS, Parameters
from trainclient.program.posted_receives import PostedReceive, posted_receives
from trainclient.program.runner import ChunkRunner
from trainclient.program.step_programs import StepPrograms, StreamError
from trainclient.topology.process_grid import GridProcess, Topology


@dataclass(frozen=True, slots=True)
class Span:
    """An operation with all that it waited for and sent, by `time.perf_counter_ns`."""

    operation: Operation
    begin_ns: int
    end_ns: int
    data_ns: int
    """Part of it in which it waited for its microbatch from the servers."""
    sent_ns: int = 0
    """When all rows that it takes were known to have been sent; before its begin if it takes none."""


@dataclass(slots=True)
class Seen:
    """What one process saw of a step in the views of one module."""

    data_wait_s: float = 0.0
    """Time in which this process waited for its next microbatch."""
    num_items: int = 0
    """Samples (backbone) or images in this process's views."""
    num_invalid: int = 0
    """Items of these that are known to be invalid."""
    samples: list[tuple[int, ...]] = field(default_factory=list)
    """(dataset, pass, sample) of every item."""


@dataclass(slots=True)
class StepRecord:
    """What one process saw of a step."""

    step: int
    num_microbatches: int
    text_tokens: int
    """Denominator of the text loss."""
    target_patches: int
    """Denominator of the generator's loss."""
    seen: Mapping[str, Seen]
    """What was seen of the step, by module."""
    spans: list[Span] = field(default_factory=list)
    """What this process did, in order."""

    @property
    def data_wait_s(self) -> float:
        """Time in which this process waited for microbatches."""
        return sum(seen.data_wait_s for seen in self.seen.values())


class Interpreter:
    """Runs the steps of one process: it looks up what an operation means, and knows no order of its own."""

    def __init__(
        self,
        execution: Execution,
        topology: Topology,
        process: GridProcess,
        runners: Sequence[ChunkRunner],
        clock: Clock,
        shared: SharedSequences | None = None,
        parameters: Parameters = WHOLE_PARAMETERS,
    ) -> None:
        """Interpret the program of a process, whose chunks the runners run, in the same order.

        Of views that ranks share by `shared`, the first rank alone counts items and has ends of routings.
        `parameters` are those of its chunks.
        """
        self._execution = execution
        self._topology = topology
        self._process = process
        self._runners = tuple(runners)
        self._clock = clock
        self._shared = shared
        self._parameters = parameters
        self.doing = "nothing yet"
        """What is run at the moment, in words; another thread may read it."""

    def run(self, streams: Sequence[Batches]) -> StepRecord | None:
        """Run the next step; gradients accumulate in the modules.

        Args:
            streams: for each module of the process its microbatches in plan order, standing before the first of a step.

        Returns:
            What was seen, or None if the stream has ended.

        Raises:
            StreamError: the microbatches are not those of one step.
        """
        self.doing = "waits for the first microbatch of a step"
        firsts = [next(batches, None) for batches in streams]
        first = firsts[0]
        if first is None:
            return None
        programs = StepPrograms.of(self._execution, first)
        operations = programs.of_process(self._process).operations
        views = self._views(firsts, streams)
        seen = {module: found.seen for module, found in views.items()}
        record = StepRecord(first.step, first.num_microbatches, first.text_tokens, first.target_patches, seen)
        self._begin(programs, views)
        for of_module in views.values():
            of_module.ahead(0)  # which was waited for
        waiting, waited = list[PostedReceive](), 0.0
        for operation, due in zip(operations, posted_receives(programs, self._topology, self._process), strict=True):
            self.doing = f"{operation.kind} of {self._subject(operation)} of step {first.step}"
            begun = time.perf_counter_ns()
            waiting = [
                receive
                for receive in (*waiting, *due)
                if not self._post(receive, views)
                and (receive.chunk, receive.microbatch) != (operation.chunk, operation.microbatch)
            ]
            with record_function(self.doing):
                self._run(operation, views)
            data_ns = round((record.data_wait_s - waited) * 1e9)
            waited = record.data_wait_s
            sent_ns = self._runners[operation.chunk].sent_ns
            record.spans.append(Span(operation, begun, time.perf_counter_ns(), data_ns, sent_ns))
        for runner in self._runners:
            runner.end_step()
        return record

    def _views(self, firsts: Sequence[Batch | None], streams: Sequence[Batches]) -> "dict[str, _Views]":
        held = [chunk.module.name for chunk in self._process.chunks]
        found = zip(self._process.modules, firsts, streams, strict=True)
        views = {m.name: _Views(first, batches, held.count(m.name), self._shared) for m, first, batches in found}
        if len({first and (first.step, first.plan_hash) for first in firsts}) > 1:
            raise StreamError(
                f"the views of {', '.join(views)} are not of one step and plan; all must come from servers of one fleet"
            )
        return views

    def _begin(self, programs: StepPrograms, views: "Mapping[str, _Views]") -> None:
        self._clock.begin_step()
        for chunk, runner in zip(self._process.chunks, self._runners, strict=True):
            runner.begin_step()
            if runner.receiver is not None:
                taken = [programs.taken(edge) for edge in self._topology.into(chunk)]
                runner.receiver.begin_step(taken, views[chunk.module.name].round)

    def _subject(self, operation: Operation) -> str:
        """What an operation works on, in words."""
        match operation.kind:
            case OperationKind.INTERACTION:
                return f"contrastive batch {operation.microbatch}"
            case OperationKind.UNSHARD | OperationKind.REDUCE:
                return f"chunk {self._process.chunks[operation.chunk]}"
        return f"microbatch {operation.microbatch}"

    def _post(self, receive: PostedReceive, views: "Mapping[str, _Views]") -> bool:
        """Post a receive, whose size is known from its view; False if that has not come yet."""
        batch = views[self._process.chunks[receive.chunk].module.name].ahead(receive.microbatch)
        if batch is not None:
            self._runners[receive.chunk].post(receive.edge, batch)
        return batch is not None

    def _run(self, operation: Operation, views: "Mapping[str, _Views]") -> None:
        number = operation.chunk
        runner = self._runners[number]
        match operation.kind:
            case OperationKind.FORWARD:
                runner.forward(operation, views[self._process.chunks[number].module.name].of(operation.microbatch))
            case OperationKind.BACKWARD:
                runner.backward(operation)
            case OperationKind.INTERACTION:
                runner.interact(operation)
            case OperationKind.EXCHANGE:
                runner.exchange(operation)
            case OperationKind.UNSHARD:
                with self._clock.running(operation):
                    self._parameters.unshard(number)
            case OperationKind.REDUCE:
                with self._clock.running(operation):
                    self._parameters.reduce(number)
            case other:
                assert_never(other)


class _Views:
    """One module's microbatches of one step, each kept until every chunk has run its forward."""

    def __init__(self, first: Batch | None, batches: Batches, passes: int, shared: SharedSequences | None) -> None:
        self.seen = Seen()
        self._step = first and first.step
        self._first = first
        self._batches = batches
        self._passes = passes
        self._shared = shared
        self._read = 0
        self._read_views: dict[int, tuple[Batch, int]] = {}

    def of(self, microbatch: int) -> Batch:
        """A microbatch for its next forward; StreamError if the stream does not bring it."""
        while microbatch not in self._read_views and microbatch >= self._read:
            self._read_next()
        batch, left = self._read_views.pop(microbatch)
        if batch.arriving is not None:
            self.seen.data_wait_s += batch.arriving.wait()
        if left > 1:
            self._read_views[microbatch] = batch, left - 1
        return batch

    def round(self, first: int) -> list[Batch]:
        """The microbatches of a round, before the first forward; StreamError if the stream does not bring them."""
        while self._read <= first:
            self._read_next()
        found = self._read_views[first][0].round
        while self._read < found.stop:
            self._read_next()
        return [self._read_views[microbatch][0] for microbatch in found]

    def _read_next(self) -> None:
        self._read_views[self._read] = self._next(), self._passes
        self._read += 1

    def ahead(self, microbatch: int) -> Batch | None:
        """A microbatch whose forward is yet to come, if it can be had without waiting."""
        while self._read <= microbatch and (self._first is not None or self._batches.ready):
            self._read_next()
        found = self._read_views.get(microbatch)
        return None if found is None else found[0]

    def _next(self) -> Batch:
        seen = self.seen
        batch, self._first = self._first or next(self._batches, None), None
        if batch is None:
            raise StreamError(f"the stream ended within step {self._step}; every step must be complete")
        if (batch.step, batch.microbatch) != (self._step, self._read):
            raise StreamError(
                f"step {batch.step}, microbatch {batch.microbatch} came where step {self._step}, microbatch "
                f"{self._read} was due"
            )
        seen.data_wait_s += batch.wait_s
        sequence_group = None if self._shared is None else self._shared.of(batch)
        if sequence_group is not None and not sequence_group.is_leader:
            return replace(batch, routings=tuple(routing.empty for routing in batch.routings))
        items = batch.items
        seen.num_items += len(items)
        seen.num_invalid += int(np.count_nonzero(items.invalid))
        columns = items.dataset, items.epoch, items.sample, *((items.part,) if len(items.part) else ())
        seen.samples += zip(*(column.tolist() for column in columns), strict=True)
        return batch
