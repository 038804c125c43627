"""Which servers of a fleet are asked for nothing at present, or no more: told apart by instance, not by address."""

import threading
from collections import OrderedDict
from time import monotonic
from typing import Final

MAX_DISTRUSTED: Final = 1024
"""Instances that are remembered; one that ends never comes back."""


class PeerHealth:
    """Which other servers of a fleet this one may ask at present. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._aside: dict[tuple[bytes, str], float] = {}
        """Until when an instance is not asked, by instance and job; by the empty name for all jobs."""
        self._distrusted: OrderedDict[bytes, None] = OrderedDict()
        """Instances that gave something wrong."""

    def allows(self, instance: bytes, job_id: str) -> bool:
        """Whether an instance may be asked for plans of a job at present."""
        now = monotonic()
        with self._lock:
            if instance in self._distrusted:
                return False
            return all(self._aside.get((instance, name), 0.0) <= now for name in ("", job_id))

    def set_aside(self, instance: bytes, seconds: float, job_id: str) -> None:
        """Do not ask an instance for plans of a job for some seconds; of any job if the name is empty."""
        now = monotonic()
        with self._lock:
            self._aside = {key: until for key, until in self._aside.items() if until > now}
            self._aside[instance, job_id] = now + seconds

    def distrust(self, instance: bytes) -> None:
        """Ask it for nothing any more."""
        with self._lock:
            self._distrusted[instance] = None
            if len(self._distrusted) > MAX_DISTRUSTED:
                self._distrusted.popitem(last=False)
