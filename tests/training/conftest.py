"""The server of the runtime's tests."""

from parallel.conftest import fleet

__all__ = ["fleet"]
