"""How fast the streams of one identity may go, all together."""

import threading
from time import monotonic


class ByteRate:
    """A limit in bytes a second that is paid for afterwards: what was sent delays what comes next. Thread-safe."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0
        """When what was sent is paid for, on the monotonic clock."""

    def spend(self, num_bytes: int) -> None:
        """Count bytes that were sent."""
        with self._lock:
            self._free_at = max(self._free_at, monotonic()) + num_bytes / self.bytes_per_s

    def delay_s(self) -> float:
        """Seconds until something may be sent again; 0 or less where that is now."""
        return self._free_at - monotonic()


class ByteRates:
    """The rates of identities, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rates: dict[str, ByteRate] = {}

    def of(self, name: str, bytes_per_s: int | None) -> ByteRate | None:
        """The rate that all streams of an identity share; None where it has no limit."""
        with self._lock:
            found = self._rates.get(name)
            if bytes_per_s is None:
                return None
            if found is None or found.bytes_per_s != bytes_per_s:  # the policy has changed
                found = self._rates[name] = ByteRate(bytes_per_s)
            return found
