"""Rows of a grouped job move by messages; ranks that share sequences split and gather them within their modules."""

from trainclient.layouts.shared.messages import chunk_ends

__all__ = ["chunk_ends"]
