"""The layouts that this trainer runs."""

from importlib import import_module
from typing import Any, Final

LAYOUTS: Final = (
    "pipelined",
    "colocated",
    "grouped",
    "contrastive",
)
"""Kinds of layouts, each the name of a folder of this package."""


def is_registered(kind: str) -> bool:
    """Whether this trainer runs a kind of layout."""
    return kind in LAYOUTS


def layout_part(kind: str, part: str) -> Any:
    """One module of the folder of a layout: `topology`, `exchange` or `degrees`; each loads no more than it needs."""
    return import_module(f"{__package__}.{kind}.{part}")
