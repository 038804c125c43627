"""Stores on loopback."""

from stores import no_stores, stores

__all__ = ["no_stores", "stores"]
