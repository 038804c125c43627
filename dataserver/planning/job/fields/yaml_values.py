"""What YAML says, in the values that JSON has; the rules are those of `text.py`."""

import re
from typing import Any, Final

import yaml
from yaml import YAMLError
from yaml.constructor import ConstructorError
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

__all__ = ["YAMLError", "yaml_value"]

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


def yaml_value(text: bytes, max_nodes: int) -> Any:
    """The value of a text of one document; None of an empty one.

    Raises:
        YAMLError, ValueError: it is no YAML, or not of that form; with its aliases written out it has more than
            `max_nodes` keys and values.
    """
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    if _written_out(node, {}) > max_nodes:
        raise ValueError(f"with its aliases written out it has more than {max_nodes} values")
    return loader.construct_document(node)


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
