"""How many cores a server would need for the rate at which its trainers consume: what an autoscaler goes by."""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
"""Time over which the need is taken, or longer where nobody asks that often."""
SAMPLE_S: Final = 5.0
"""Least time between two samples."""
MOST_GROWTH: Final = 4.0
"""Trainers that always wait may want any number of cores; this many times as many are asked for at once."""
FULL: Final = 0.8
"""The share of its cores that a server should be busy with: beyond, streams wait for each other."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Totals of a server at one moment."""

    at_s: float
    """Seconds on the steady clock."""
    cpu_s: float
    """CPU time of the process, and of those that it started."""
    waited_s: float
    """Time, summed over streams, in which a trainer waited for the server: planning and decoding."""
    stream_s: float
    """Time, summed over streams, for which they were open."""


class CoresWanted:
    """The need over the last minute, taken from the totals of whenever somebody asks. Thread-safe."""

    def __init__(self, start: Usage) -> None:
        self._lock = threading.Lock()
        self._past = deque([start])

    def at(self, now: Usage) -> float:
        """The cores wanted, from now back to about `WINDOW_S` ago."""
        with self._lock:
            while len(self._past) > 1 and self._past[1].at_s <= now.at_s - WINDOW_S:
                self._past.popleft()
            found = wanted_cores(self._past[0], now)
            if now.at_s - self._past[-1].at_s >= SAMPLE_S:
                self._past.append(now)
            return found


def wanted_cores(before: Usage, now: Usage) -> float:
    """Cores that would make all that the trainers can take.

    A stream whose trainer waited a share w of the time takes 1 / (1 - w) times as much when it need not wait. What is
    made now costs the CPU time that the server used; so much more is wanted, and some to spare. 0 without streams.
    """
    elapsed_s, stream_s = now.at_s - before.at_s, now.stream_s - before.stream_s
    if elapsed_s <= 0 or stream_s <= 0:
        return 0.0
    taking = max(1 - (now.waited_s - before.waited_s) / stream_s, 1 / MOST_GROWTH)
    used_s = max(0.0, now.cpu_s - before.cpu_s)  # what a process used that was killed with its parent is forgotten
    return used_s / elapsed_s / taking / FULL
