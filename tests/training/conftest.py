"""The server and the processes of the runtime's tests."""

from program.conftest import fleet, pool

__all__ = ["fleet", "pool"]
