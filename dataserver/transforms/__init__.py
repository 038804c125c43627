"""Transforms that users install as Python packages: found by their entry points, and run in processes of their own."""

from dataserver.transforms.errors import (
    TransformError,
    TransformFailedError,
    TransformUnavailableError,
    TransformUnknownError,
)
from dataserver.transforms.installed import Kind, named_versions, parse_transform
from dataserver.transforms.pool import NO_TRANSFORMS, Pixels, TransformPool

__all__ = [
    "NO_TRANSFORMS",
    "Kind",
    "Pixels",
    "TransformError",
    "TransformFailedError",
    "TransformPool",
    "TransformUnavailableError",
    "TransformUnknownError",
    "named_versions",
    "parse_transform",
]
