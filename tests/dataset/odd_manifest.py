"""Reads the manifest of `scripts/fixtures/make_odd_shards.py`."""

from collections.abc import Iterator
from typing import Any

Place = tuple[str, str]
"""Shard and key."""


def samples(manifest: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Each sample with what becomes of it."""
    for name, shard in manifest["shards"].items():
        for key, sample in shard["samples"].items():
            yield (name, key), sample


def said(manifest: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Shard, key and kind of all that must be found."""
    yield from ((name, "", kind) for name, kind in manifest["files"].items())
    for name, shard in manifest["shards"].items():
        yield from ((name, "", kind) for kind in shard["kinds"])
    for (name, key), sample in samples(manifest):
        yield from ((name, key, kind) for kind in sample["kinds"])
