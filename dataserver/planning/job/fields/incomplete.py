"""A job as people write it: what only the servers know may be left out, and a server fills it in.

A job is complete when it states every field that `absent_fields` looks for. Other fields that are left out have their
defaults, which are the same everywhere.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from dataserver.planning.job.fields.stream import ConversationSpec, DatasetSpec, Stream, TokenizerSpec
from dataserver.planning.job.fields.values import SpecModel

Path = tuple[str | int, ...]
"""Where a field is in a job."""

FILLED_IN: Final[Mapping[type[SpecModel], tuple[str, ...]]] = MappingProxyType(
    {
        Stream: ("tokenizer",),
        DatasetSpec: ("fingerprint", "quarantine", "transformed"),
        ConversationSpec: ("template",),
        TokenizerSpec: tuple(TokenizerSpec.model_fields),
    }
)
"""The fields of each part of a job that a server fills in where they are absent; null is not absent, except for
`transformed`, which a dataset has with transforms alone."""


def absent_fields(data: Any) -> list[Path]:
    """The fields that a server has to fill in; empty for a complete job.

    Args:
        data: the values of a job's JSON; whatever does not look like a job is passed over, for `parse_job` to refuse.
    """
    stream = data.get("stream") if isinstance(data, Mapping) else None
    if not isinstance(stream, Mapping):
        return []
    datasets = stream.get("datasets")
    entries = list(enumerate(datasets if isinstance(datasets, list | tuple) else ()))
    parts: list[tuple[type[SpecModel], Path, Any]] = [
        (DatasetSpec, ("stream", "datasets", i), entry) for i, entry in entries
    ]
    parts += [
        (ConversationSpec, ("stream", "datasets", i, "conversations"), entry.get("conversations"))
        for i, entry in entries
        if isinstance(entry, Mapping)
    ]
    parts.append((TokenizerSpec, ("stream", "tokenizer"), stream.get("tokenizer", {})))
    return [
        (*path, field)
        for model, path, part in parts
        if isinstance(part, Mapping)
        for field in FILLED_IN[model]
        if _is_absent(field, part)
    ]


def _is_absent(field: str, part: Mapping[str, Any]) -> bool:
    if field == "transformed":
        has_transforms = part.get("metadata_transforms") or part.get("text_transforms")
        return bool(has_transforms) and part.get(field) is None
    return field not in part


def value_at(data: Any, path: Path) -> Any:
    """The value of a field that is there."""
    for part in path:
        data = data[part]
    return data


def json_pointer(path: Path) -> str:
    """The field's place as RFC 6901 writes it; names of fields hold nothing that would be escaped."""
    return "".join(f"/{part}" for part in path)
