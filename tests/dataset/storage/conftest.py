"""Stores on loopback."""

from stores import stores

__all__ = ["stores"]
