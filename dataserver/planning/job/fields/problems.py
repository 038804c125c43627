"""What is wrong with a job, in one line: each field by its path, what was found there, what is required."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dataserver.planning.job.fields.values import PATTERN_RULES

Path = tuple[int | str, ...]
"""Where an error is in a job."""

_MOST_SHOWN = 8
"""Problems in one message; whoever has more will have to ask again anyway."""
_MOST_CHARS = 64
"""A longer value is cut in a message."""
_UNKNOWN = frozenset({"extra_forbidden", "union_tag_invalid", "literal_error", "enum"})
_HINTS = {
    ("string_type", "int"): "; put it in quotes",
    ("string_type", "float"): "; put it in quotes",
    ("int_type", "str"): "; write it without quotes",
    ("int_type", "float"): "; write it without a fraction and without an exponent",
    ("bool_type", "str"): "; write true or false, without quotes",
}


def all_unknown(error: ValidationError, data: Any) -> bool:
    """Whether nothing is wrong with the data but fields, and choices, that this release does not know."""
    return all(e["type"] in _UNKNOWN for e in _causes(error, data))


def describe(error: ValidationError, data: Any, model: type[BaseModel], *, quoted: bool = True) -> str:
    """One line for all that pydantic found when it validated the data against the model.

    Args:
        error: what was found.
        data: that was validated.
        model: what it should be.
        quoted: whether values and unknown keys are quoted; without them the model alone says what is in the message,
            if it has no unions of kinds and its own validators quote nothing either.
    """
    shown = _causes(error, data)
    problems = [f"{_path_of(e, data, quoted)}: {_problem(e, model, quoted)}" for e in shown[:_MOST_SHOWN]]
    more = [f"and {len(shown) - _MOST_SHOWN} more"] if len(shown) > _MOST_SHOWN else []
    return "; ".join(problems + more)


def _causes(error: ValidationError, data: Any) -> list[ErrorDetails]:
    """What is wrong, without what only follows from that."""
    errors = error.errors(include_url=False)
    paths = [e["loc"] for e in errors]
    return [e for e in errors if not _follows(e, paths, data)]


def _follows(error: ErrorDetails, paths: Sequence[Path], data: Any) -> bool:
    """Whether an error only follows from another one."""
    path = error["loc"]
    if error["type"] == "too_short":  # pydantic does not count members that are wrong
        return any(len(other) > len(path) and other[: len(path)] == path for other in paths)
    if error["type"] == "missing" and path[0] == "stream":  # a server fills in what stands beside the name
        return path[-1] != "name" and (*path[:-1], "name") in paths
    # a default that depends on a field that is wrong
    return error["type"] == "model_type" and error["input"] is None and bool(path) and not _has(data, path)


def _has(data: Any, path: Path) -> bool:
    for part in path[:-1]:
        data = _member(data, part)
    if isinstance(data, list | tuple):
        return isinstance(path[-1], int)
    return isinstance(data, Mapping) and path[-1] in data


def _path_of(error: ErrorDetails, data: Any, quoted: bool) -> str:
    """The dotted path of a field in the data; pydantic also names the member of a union that it took."""
    parts, path = [], error["loc"]
    if error["type"] == "extra_forbidden" and not quoted:
        path = path[:-1]
    for position, part in enumerate(path):
        missing = error["type"] == "missing" and position == len(path) - 1
        if missing or data is None or _has(data, (part,)):
            parts.append(str(part)[:_MOST_CHARS])
            data = _member(data, part)
    return ".".join(parts) or "job"


def _member(data: Any, key: int | str) -> Any:
    try:
        return data[key]
    except (KeyError, IndexError, TypeError):
        return None


def _problem(error: ErrorDetails, model: type[BaseModel], quoted: bool) -> str:
    kind, found = error["type"], error["input"]
    if kind == "extra_forbidden":
        import difflib  # most jobs are spelled right

        near = difflib.get_close_matches(str(error["loc"][-1])[:_MOST_CHARS], _fields_beside(error["loc"], model), 1)
        meant = f"is {near[0]} meant?" if near else "correct its spelling, or use the release that knows it"
        return f"{'this key' if quoted else 'a key'} is unknown; {meant}"
    if kind == "union_tag_invalid":
        tags = error["ctx"]["expected_tags"].replace("'", "")
        return f"kind is {_shown(error['ctx']['tag'])}; one of {tags} is required"
    if kind == "union_tag_not_found":
        return "kind is missing; say which one this is"
    message = required(error)
    message = message.replace("Input should", "it should").replace("Tuple should", "it should")
    if kind in ("missing", "value_error", "json_invalid"):
        return message
    was = f"found {_shown(found)}; " if quoted else ""
    return f"{was}{message}{_HINTS.get((kind, type(found).__name__), '')}"


def required(error: ErrorDetails) -> str:
    """What a field asks for, in words."""
    if error["type"] == "string_pattern_mismatch":
        return PATTERN_RULES[error["ctx"]["pattern"]]
    return error["msg"].removeprefix("Value error, ")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    text = json.dumps(value, default=str)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} ..."


def _fields_beside(path: Path, model: type[BaseModel]) -> list[str]:
    """The fields that may take the place of the last part of a path; those of all members of a union."""
    models = [model]
    for part in path[:-1]:
        fields = [m.model_fields[part] for m in models if isinstance(part, str) and part in m.model_fields]
        models = [inner for field in fields for inner in _models_in(field.annotation)] or models
    return sorted({name for m in models for name in m.model_fields})


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
