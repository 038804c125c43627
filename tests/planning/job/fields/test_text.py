"""The loader of jobs and configurations: the same values from YAML and JSON, and nothing that JSON does not have."""

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dataserver.planning.job.fields.text import MAX_TEXT_BYTES, TextError, parse_json, parse_yaml

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abc:<=~0y", max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_what_json_writes_reads_back(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@given(VALUES)
def test_what_yaml_writes_reads_back(value: Any) -> None:
    shared = [value, value, 0.5, 1e-07, "1e3", "-.5", "0.", "1_0", "=", "<<"]  # PyYAML writes the second as an alias
    assert parse_yaml(yaml.safe_dump(shared).encode()) == shared


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a:", {"a": None}),
        (
            "[010, 0x1f, 1_000, 1:30, 2024-01-01, yes, .nan]",
            ["010", "0x1f", "1_000", "1:30", "2024-01-01", "yes", ".nan"],
        ),
        (
            "[7, -7, 0.97, 1.0e-4, .5, 1e3, true, False, ~, null]",
            [7, -7, 0.97, 1e-4, 0.5, "1e3", True, False, None, None],
        ),
        ("{a: &x {b: 1, c: 2}, d: {<<: *x, c: 3}}", {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}),
        ('{"a": [1, "1", 1.0]}', {"a": [1, "1", 1.0]}),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: Any) -> None:
    found = parse_yaml(text.encode())
    assert found == value
    assert repr(found) == repr(value), "types, too"


BOMB = "a: &a [" + ", ".join("x" * 10) + "]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, d: 2, c: 1}", "key 'c' stands twice; every key may stand once in .* line 2"),
        ("a: 1\n'a': 2", "key 'a' stands twice"),
        ("1: a", "a key is no text; put it in quotes"),
        ("? [a]\n: 1", "a key is no text"),
        ("a: !!set {b}", "tag 'tag:yaml.org,2002:set' is not allowed"),
        ("a: !!timestamp 2024-01-01", "is not allowed"),
        ("!!python/object/apply:os.system [id]", "python/object/apply:os.system' is not allowed"),
        ("a: &a [*a]", "an alias stands within what it names"),
        (BOMB, "with its aliases written out it has more than 1048576 values"),
        ("[" * 2000, "too deep in each other"),
        ("a: [", "not valid YAML"),
        ("--- 1\n--- 2", "a single document"),
        ("9" * 5000, "not valid YAML"),
        ("\x00", "not valid YAML"),
        (" " * (MAX_TEXT_BYTES + 1), "it has 1048577 bytes; at most 1048576 are allowed"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        parse_yaml(text.encode())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 1}}', r"an object names \['c'\] twice"),
        ("[NaN]", "NaN is no JSON number"),
        ("{a: 1}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON: .* too deep in each other"),
        ("9" * 5000, "not valid JSON: a number has 5000 digits; at most 1000 are allowed"),
        (" " * MAX_TEXT_BYTES + "1", "it has 1048577 bytes"),
        ("{" + ",".join(f'"{i // 2}":0' for i in range(90_000)) + "}", r"names \['0', '1', .* twice"),
    ],
    ids=lambda text: text[:20],
)
def test_json_that_is_refused(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        parse_json(text)
