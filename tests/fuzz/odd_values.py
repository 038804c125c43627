"""Good files and messages with a few values changed, in the words of their format, drawn by Hypothesis."""

import copy
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from fuzz.odd_bytes import PLACES, TIMES, Change, changes, harmed
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

TEXTS: Final = (
    st.text(max_size=20)
    | st.builds(lambda text, times: text * times, st.sampled_from(("x", "[", "\u0301")), st.integers(0, 5000))
    | st.decimals().map(str)
    | st.sampled_from(("../../etc/passwd", "%s%n", "{}", "\u017f\u202e\U0001f600"))
)
EDGES: Final = sorted(
    sign * (1 << bits) + more for sign in (-1, 1) for bits in (15, 31, 32, 53, 63, 64) for more in (-1, 0)
)
"""Integers where types end."""
INTEGERS: Final = st.sampled_from(EDGES) | st.integers(-(1 << 65), 1 << 65)
LEAVES: Final = INTEGERS | st.none() | st.booleans() | st.floats() | TEXTS
VALUES: Final = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(TEXTS, LEAVES, max_size=3)
NUMBERS: Final = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
}


def odd_values(value: Any) -> SearchStrategy[Any]:
    """What JSON can say, with values replaced, taken from elsewhere, left out, repeated, or under other names."""
    kinds = (
        (replace, PLACES, VALUES),
        (take, PLACES, PLACES),
        (remove, PLACES),
        (multiply, PLACES, TIMES),
        (rename, PLACES, TEXTS),
    )
    return changes(*kinds).map(lambda found: _changed(value, found))


def odd_json(file: bytes) -> SearchStrategy[bytes]:
    """JSON with odd values; nothing, if it is not the JSON of a list or an object."""
    value = _parsed(file)
    return odd_values(value).map(_spelled) if isinstance(value, dict | list) else st.nothing()


def odd_lines(file: bytes) -> SearchStrategy[bytes]:
    """Lines of JSON with odd values."""
    lines = [json.loads(line) for line in file.splitlines()]
    return odd_values(lines).map(lambda values: b"".join(_spelled(value) + b"\n" for value in values))


def odd_arrays(file: bytes) -> SearchStrategy[bytes]:
    """A file of named arrays that is described otherwise, or holds other bytes; its digest is right."""
    magic, description, arrays = file.split(b"\n", 2)
    parts = st.tuples(odd_json(description) | st.just(description), st.just(arrays) | harmed([arrays])).map(b"\n".join)
    return parts.map(lambda rest: magic[:-64] + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)


def odd_parquets(file: bytes) -> SearchStrategy[bytes]:
    """A Parquet file with odd values, of other types where they need it; nothing, if it is none."""
    try:
        return _odd_tables(pq.read_table(io.BytesIO(file))).map(_parquet)
    except ValueError:
        return st.nothing()


def odd_arrows(file: bytes) -> SearchStrategy[bytes]:
    """An Arrow file with odd values; those in its metadata count as JSON."""
    return _odd_tables(pa.ipc.open_file(file).read_all()).map(_arrow)


def _spelled(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parsed(text: bytes) -> Any:
    """What it says as JSON; the text itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode(errors="replace")


def _changed(value: Any, changes: list[Change]) -> Any:
    value = copy.deepcopy(value)
    for change, place, *given in changes:
        if places := list(_places(value)):
            change(places, place % len(places), *given)
    return value


Places = list[tuple[Any, Any]]
"""Every container, with each of its keys."""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def replace(places: Places, at: int, value: Any) -> None:
    """Put something else there."""
    container, key = places[at]
    container[key] = copy.deepcopy(value)


def take(places: Places, at: int, other: int) -> None:
    """Put there what stands elsewhere."""
    container, key = places[other % len(places)]
    replace(places, at, container[key])


def remove(places: Places, at: int) -> None:
    """Leave it out."""
    container, key = places[at]
    del container[key]


def multiply(places: Places, at: int, times: int) -> None:
    """Repeat the list or the text that is there."""
    container, key = places[at]
    if isinstance(container[key], list | str):
        container[key] = container[key] * times


def rename(places: Places, at: int, name: str) -> None:
    """Give it another name as well."""
    container, key = places[at]
    if isinstance(container, dict):
        container[name] = copy.deepcopy(container[key])


def _parquet(table: pa.Table) -> bytes:
    try:
        pq.write_table(table, sink := io.BytesIO())
    except pa.ArrowNotImplementedError:  # a type that Parquet has not
        reject()
    return sink.getvalue()


def _arrow(table: pa.Table) -> bytes:
    with pa.ipc.new_file(sink := io.BytesIO(), table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _odd_tables(table: pa.Table) -> SearchStrategy[pa.Table]:
    types = {field.name: field.type for field in table.schema}
    metadata = {key.decode(): _parsed(value) for key, value in (table.schema.metadata or {}).items()}
    odd = odd_values(metadata) if metadata else st.just(metadata)
    return st.builds(_table, odd_values(table.to_pydict()), st.just(metadata) | odd, st.just(types))


def _table(columns: dict[str, Any], metadata: dict[str, Any], types: dict[str, pa.DataType]) -> pa.Table:
    lists = {name: values if isinstance(values, list) else [values] for name, values in columns.items()}
    rows = max(map(len, lists.values()), default=0)
    arrays = {
        name: _array([*values, *[None] * (rows - len(values))], types.get(name)) for name, values in lists.items()
    }
    texts = {key: value if isinstance(value, str) else _spelled(value) for key, value in metadata.items()}
    return pa.table(arrays).replace_schema_metadata(texts)


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    for wanted in (kind, None):
        with suppress(pa.ArrowException, ValueError, TypeError, OverflowError):
            return pa.array(values, wanted)
    return pa.array(map(str, values))


def odd_messages(message: Message) -> SearchStrategy[Message]:
    """A message with other values in its fields; texts that hold JSON are odd JSON."""
    fields = [st.tuples(st.just(field.name), _field(field, message)) for field in message.DESCRIPTOR.fields]
    if not fields:
        return st.just(message)
    return st.lists(st.one_of(fields), min_size=1, max_size=3).map(lambda found: _merged(message, found))


def _field(field: FieldDescriptor, message: Message) -> SearchStrategy[Any]:
    known = getattr(message, field.name)
    if field.message_type is not None:
        one = odd_messages(GetMessageClass(field.message_type)() if field.is_repeated else known)
    elif field.type == FieldDescriptor.TYPE_STRING:
        one = TEXTS | odd_json(known.encode()).map(bytes.decode) if not field.is_repeated else TEXTS
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = st.binary(max_size=64) | st.just(bytes(1 << 20))
    else:
        one = NUMBERS[field.cpp_type]
    if field.is_repeated:
        return st.lists(one, max_size=3) | st.tuples(one).map(lambda values: [*values * 1000])
    return one


def _merged(message: Message, fields: list[tuple[str, Any]]) -> Message:
    merged = copy.deepcopy(message)
    for name, value in fields:
        merged.ClearField(name)
        merged.MergeFrom(type(message)(**{name: value}))
    return merged
