"""Rows of a pipelined job move by messages, microbatch by microbatch."""

from trainclient.layouts.shared.messages import chunk_ends

__all__ = ["chunk_ends"]
