"""The functions that kernels call."""

from collections.abc import Callable
from typing import Any, Final

PARTS: Final[dict[Callable[..., Any], dict[str, str]]] = {}
"""With what the compiler is told of each."""
