"""The text of a job or a configuration: YAML or JSON, to the values that JSON has.

Both forms mean the same here: every key of a mapping is text and stands once, and nothing but mappings, lists, texts,
numbers, true, false and null comes out. What versions of YAML do not agree about is text: 010, 1_000, 1e3, yes, dates.
"""

import json
from collections import Counter
from typing import Any, Final, NoReturn

MAX_TEXT_BYTES: Final = 1 << 20
"""A longer job or configuration is refused unread."""
MAX_NODES: Final = 1 << 20
"""Keys and values of a YAML text with its aliases written out."""
MAX_DIGITS: Final = 1000
"""An integer with more digits is refused; the largest that a job can state has 16."""


class TextError(ValueError):
    """A text that is no YAML or JSON of the form above, or too long; says where.

    Attributes:
        line: of a YAML text, counted from 1, without what the message quotes of it; None where none is known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        TextError: it is no JSON, longer than MAX_TEXT_BYTES, or a key stands twice in one object.
    """
    _check_size(len(text.encode("utf-8", "surrogatepass")))
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_int=_integer)
    except ValueError as error:
        raise TextError(f"not valid JSON: {error}") from None
    except RecursionError:
        raise TextError("not valid JSON: objects and arrays stand too deep in each other") from None


def parse_yaml(text: bytes) -> Any:
    """The value of a YAML text of one document; None of an empty one.

    Raises:
        TextError: it is no YAML, longer than MAX_TEXT_BYTES, a key stands twice in one mapping or is no text, a tag
            asks for more than JSON has, or its aliases stand for more than MAX_NODES values.
    """
    _check_size(len(text))
    # With PyYAML, whose tables take 10 ms; jobs come as JSON, and servers without a file.
    from dataserver.planning.job.fields.yaml_values import YAMLError, yaml_value

    try:
        return yaml_value(text, MAX_NODES)
    except (YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = None if mark is None else mark.line + 1
        raise TextError(f"not valid YAML: {' '.join(str(error).split())}", line) from None
    except RecursionError:
        raise TextError("not valid YAML: mappings and lists stand too deep in each other") from None


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        raise TextError(f"it has {num_bytes} bytes; at most {MAX_TEXT_BYTES} are allowed")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1][:8]
        raise ValueError(f"an object names {twice} twice; every key may stand once")
    return found


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
