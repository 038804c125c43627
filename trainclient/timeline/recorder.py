"""Writes the timelines of some steps of a run: a trace, and a table of where the time went."""

import io
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dataserver.chrome_trace import trace_json
from dataserver.outputs import write_whole
from dataserver.planning.job.fields import Stream
from trainclient.checkpoint.lease import Lease
from trainclient.client import DataClient
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.program.clock import Stopwatch
from trainclient.program.interpreter import StepRecord
from trainclient.stream.errors import ClientError
from trainclient.timeline.recorded import Recorded, gather
from trainclient.timeline.time_breakdown import write_report
from trainclient.timeline.trace import trace_events
from trainclient.timeline.tracks import MicrobatchSamples, tracks_of
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import Groups


class TimelineRecorder:
    """Records some steps of a run; all processes call its methods in the same ones."""

    def __init__(
        self,
        directory: Path | None,
        steps: range,
        topology: Topology,
        groups: Groups,
        stream: Stream,
        lease: Lease | None = None,
    ) -> None:
        """Record these steps into a folder, or none without one.

        Args:
            directory: the folder.
            steps: the steps.
            topology: of the job.
            groups: this process and the others.
            stream: of the job.
            lease: of the folder; only the first process has it.
        """
        self._directory = directory
        self._steps = steps
        self._topology = topology
        self._groups = groups
        self._stream = stream
        self._lease = lease
        self._origin_ns = 0

    def records(self, step: int) -> bool:
        """Whether a step is recorded."""
        return self._directory is not None and step in self._steps

    def begin(self) -> None:
        """Let all processes begin a step at once, and count time from here."""
        if self._groups.device.type == "cuda":
            torch.cuda.synchronize(self._groups.device)
        with translate_rank_errors("other ranks"):
            dist.barrier(self._groups.control)
        self._origin_ns = time.perf_counter_ns()

    def end(self, record: StepRecord, clock: Stopwatch, client: DataClient) -> None:
        """Bring together what all processes recorded; the first one writes it."""
        own = Recorded.of(record.spans, clock.executed(), self._origin_ns)
        with translate_rank_errors("other ranks"):
            recorded = gather(own, self._groups)
        if self._groups.rank == 0 and self._directory is not None:
            self._write(record.step, recorded, client, self._directory)

    def _write(self, step: int, recorded: list[Recorded], client: DataClient, directory: Path) -> None:
        """Write both files. What cannot be written is said, and no reason to end a run.

        Raises:
            LeaseLostError: another run has taken the folder over.
        """
        trace, report = (directory / f"step-{step:08d}.{kind}" for kind in ("json", "txt"))
        try:
            plan = client.get_plan(step, with_timelines=True)
            tracks = tracks_of(plan, self._topology, recorded)
            directory.mkdir(parents=True, exist_ok=True)
            table = io.StringIO()
            write_report(step, tracks, MicrobatchSamples(plan, self._topology, self._stream), table)
            if self._lease is not None:
                self._lease.require()
            write_whole(report, table.getvalue())
            about = {"job_id": plan.job_id, "step": step, "plan_hash": plan.plan_hash.hex()}
            write_whole(trace, trace_json(trace_events(tracks), about))
        except (ClientError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            sys.stderr.write(f"timeline of step {step} is not written: {reason}\n")
            return
        sys.stderr.write(f"timeline of step {step}: {report}; ui.perfetto.dev opens {trace}\n")
