"""Transforms that users install as Python packages: found by their entry points, and run in processes of their own."""

from dataserver.transforms.errors import (
    TransformError,
    TransformFailedError,
    TransformUnavailableError,
    TransformUnknownError,
)
from dataserver.transforms.installed import GROUP, Installed, Kind, find_installed, named_versions, parse_transform
from dataserver.transforms.pool import NO_TRANSFORMS, TIMEOUT_S, Pixels, TextOrFailure, TransformPool

__all__ = [
    "GROUP",
    "NO_TRANSFORMS",
    "TIMEOUT_S",
    "Installed",
    "Kind",
    "Pixels",
    "TextOrFailure",
    "TransformError",
    "TransformFailedError",
    "TransformPool",
    "TransformUnavailableError",
    "TransformUnknownError",
    "find_installed",
    "named_versions",
    "parse_transform",
]
