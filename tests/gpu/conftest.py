"""The server of the runtime's tests."""

from program.conftest import fleet

__all__ = ["fleet"]
