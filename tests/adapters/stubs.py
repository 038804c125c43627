"""The parts of frameworks that adapters build on, for tests of the adapters' own decisions without the packages."""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module, metadata
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Self, TypeVar

import pytest

T = TypeVar("T")


class Base:
    """A class of a framework that adapters derive from."""


class GenericBase(Generic[T]):
    """One with a type parameter, and what Grain's have."""

    _stats = SimpleNamespace(record_self_time=nullcontext)

    def __iter__(self) -> Self:
        return self

    def _assert_not_closed(self) -> None:
        assert not getattr(self, "closed", False)

    def close(self) -> None:
        self.closed = True


def parallel_state(place: tuple[int, int] | None = None) -> SimpleNamespace:
    """Megatron's: where it runs a process among its data-parallel ranks, if it was told."""
    rank, ranks = place or (0, 1)
    return SimpleNamespace(
        model_parallel_is_initialized=lambda: place is not None,
        get_data_parallel_rank=lambda: rank,
        get_data_parallel_world_size=lambda: ranks,
    )


def adapter_over(
    monkeypatch: pytest.MonkeyPatch, name: str, releases: Mapping[str, str], modules: Mapping[str, Mapping[str, Any]]
) -> ModuleType:
    """An adapter, imported over modules that have no more than what is given.

    Args:
        monkeypatch: undoes it all.
        name: of the adapter's module.
        releases: of the packages that it asks for.
        modules: of these packages, each with its contents.
    """
    real = metadata.version
    monkeypatch.setattr("trainclient.adapters.versions.version", lambda package: releases.get(package) or real(package))
    for module, contents in modules.items():
        stub = ModuleType(module)
        vars(stub).update(contents)
        monkeypatch.setitem(sys.modules, module, stub)
    whole = f"trainclient.adapters.{name}"
    monkeypatch.delitem(sys.modules, whole, raising=False)
    found = import_module(whole)
    monkeypatch.setitem(sys.modules, whole, found)  # taken out again with the stubs
    return found
