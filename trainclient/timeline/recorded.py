"""When every process ran its operations, gathered from all of them."""

from dataclasses import dataclass, fields

import numpy as np
import torch

from dataserver.planning import I64
from trainclient.exchange.gathering import all_gather_rows
from trainclient.program.clock import Executed
from trainclient.program.interpreter import Span
from trainclient.topology.process_groups import Groups


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """The operations of one process in one step; int64 [n] each, nanoseconds from the begin of the step."""

    start_ns: I64
    """When it began to compute: its microbatch and its rows had come."""
    end_ns: I64
    """Time at which the operation had computed."""
    done_ns: I64
    """When its rows were sent, and the next operation began."""
    data_ns: I64
    """How long it waited for its microbatch from the servers."""
    rows_sent_ns: I64
    """When its rows were known to have been sent; its start if it takes none."""
    within_ns: I64
    """How long it waited for other processes between its start and its end."""

    @classmethod
    def of(cls, spans: list[Span], executed: list[Executed], origin_ns: int) -> "Recorded":
        """Record what an interpreter and a clock noted, by `time.perf_counter_ns`, whose `origin_ns` is the begin."""
        rows = [
            (
                run.start_ns - origin_ns,
                run.end_ns - origin_ns,
                max(span.end_ns, run.end_ns) - origin_ns,  # a device may still compute when its rows are being sent
                span.data_ns,
                (span.sent_ns if span.sent_ns >= span.begin_ns else run.start_ns) - origin_ns,
                run.waited_ns,
            )
            for span, run in zip(spans, executed, strict=True)
        ]
        return cls(*np.array(rows, np.int64).reshape(-1, len(fields(cls))).T)

    @property
    def computed_ns(self) -> I64:
        """How long each operation computed."""
        return self.lasted_ns - self.within_ns

    @property
    def lasted_ns(self) -> I64:
        """How long each operation took once it began."""
        return self.end_ns - self.start_ns

    @property
    def moved_ns(self) -> I64:
        """How long each operation waited for rows that had been sent."""
        moved: I64 = np.maximum(self.start_ns - np.maximum(self.rows_sent_ns, self._free_ns + self.data_ns), 0)
        return moved

    @property
    def waited_ns(self) -> I64:
        """How long each operation waited for other processes to send their rows, before it began to compute."""
        waited: I64 = np.maximum(self.start_ns - self._free_ns - self.data_ns - self.moved_ns, 0)
        return waited

    @property
    def sent_ns(self) -> I64:
        """How long each operation took to send its rows."""
        sent: I64 = np.maximum(self.done_ns - self.end_ns, 0)
        return sent

    @property
    def _free_ns(self) -> I64:
        """When the operation before was done."""
        return np.concatenate([np.zeros(1, np.int64), self.done_ns])[:-1]


def gather(own: Recorded, groups: Groups) -> list[Recorded]:
    """What all processes recorded, by their global rank. All call this together."""
    rows = torch.from_numpy(np.stack([getattr(own, field.name) for field in fields(own)]))
    return [Recorded(*found.numpy()) for found in all_gather_rows(rows, groups.control)]
