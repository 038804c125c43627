"""The datasets and the server of the tests of serving."""

from serving.conftest import datasets, server

__all__ = ["datasets", "server"]
