"""The text of a job or a configuration: YAML or JSON, to the values that JSON has.

Both forms mean the same here: every key of a mapping is text and stands once, and nothing but mappings, lists, texts,
numbers, true, false and null comes out. What versions of YAML do not agree about is text: 010, 1_000, 1e3, yes, dates.
"""

import json
import re
from collections import Counter
from typing import Any, Final, NoReturn

import yaml
from yaml.constructor import ConstructorError
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

MAX_TEXT_BYTES: Final = 1 << 20
"""Of a job or a configuration."""
MAX_NODES: Final = 1 << 20
"""Keys and values of a YAML text with its aliases written out."""
MAX_DIGITS: Final = 1000
"""Of an integer in JSON; the largest that a job can state has 16."""

_PREFIX: Final = "tag:yaml.org,2002:"
_TAGS: Final = frozenset(_PREFIX + name for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge"))
_SCALARS: Final = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"([-+]?(0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)([eE][-+][0-9]+)?", list("-+.0123456789")),
    ("merge", "<<", ["<"]),
)
"""Plain scalars that are no text: tag, form, first characters. All of them are what they are in YAML 1.1 and in 1.2."""


class TextError(ValueError):
    """A text that is no YAML or JSON of the form above, or too long; says where."""


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
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _written_out(node, {}) > MAX_NODES:
            raise TextError(f"not valid YAML: with its aliases written out it has more than {MAX_NODES} values")
        return loader.construct_document(node)
    except TextError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise TextError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise TextError("not valid YAML: mappings and lists stand too deep in each other") from None


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        raise TextError(f"it has {num_bytes} bytes; at most {MAX_TEXT_BYTES} are allowed")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with unique keys and its own scalars."""

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """A mapping; here, because merging (`<<`) later rewrites its keys."""
        node: MappingNode = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if key.tag != f"{_PREFIX}merge"]
        seen = set[str]()
        for key in keys:
            if not isinstance(key, ScalarNode) or key.tag != f"{_PREFIX}str":
                raise ConstructorError(None, None, "a key is no text; put it in quotes", key.start_mark)
            if key.value in seen:
                problem = f"key {key.value[:128]!r} stands twice; every key may stand once"
                raise ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {}
for _name, _form, _first in _SCALARS:
    _Loader.add_implicit_resolver(_PREFIX + _name, re.compile(f"^(?:{_form})$"), _first)


def _written_out(node: Node, sizes: dict[int, int]) -> int:
    """Values below a node, aliases written out; `sizes` holds those of the nodes seen, 0 while a node is open.

    Raises:
        ConstructorError: a node holds itself, or has a tag of its own.
    """
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ConstructorError(None, None, "an alias stands within what it names", node.start_mark)
        return sizes[id(node)]
    if node.tag not in _TAGS:
        raise ConstructorError(None, None, f"tag {node.tag[:128]!r} is not allowed; leave it out", node.start_mark)
    sizes[id(node)] = 0
    below: list[Node] = []
    if isinstance(node, MappingNode):
        below = [part for pair in node.value for part in pair]
    elif isinstance(node, CollectionNode):
        below = node.value
    sizes[id(node)] = 1 + sum(_written_out(part, sizes) for part in below)
    return sizes[id(node)]


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
