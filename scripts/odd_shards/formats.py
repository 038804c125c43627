"""The samples of an odd tar in other formats: rows of Parquet, a manifest with loose images, a split of Energon's.

What must be said of them is what must be said of the tar, but for what a format cannot express, or says in other words.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from odd_shards.images import Rng
from odd_shards.shards import OddShard
from odd_shards.tars import Tar
from odd_shards.verdicts import CAPTION, LEFT_OUT, SERVED, TEXT, Odd

Files = dict[str, bytes]
"""Contents by path."""


class Written(NamedTuple):
    """A mixture in another format."""

    shard: str
    """Its name."""
    files: Files
    said: OddShard
    """What must be said of it."""
    split: str = ""
    """What names the dataset, behind its folder."""
    unread: tuple[str, ...] = ()
    """Files that look like shards, and are not read."""


Writer = Callable[[OddShard, Rng], Written]

_OTHER_MEMBERS: Final = ("cls", "npy")
"""Extensions of members for which neither rows nor lines have a name."""
_OF_BOTH: Final[Mapping[str, Odd]] = {
    "image twice": Odd((), SERVED, ("unused_part",)),  # in a list the second one has a name of its own
    "text twice": Odd((), SERVED, (), TEXT),  # there is one column, and one entry
    "something else alone": Odd((), LEFT_OUT, ("missing_caption",)),
}
_OF_ROWS: Final[Mapping[str, Odd]] = {
    name: Odd((), LEFT_OUT, ("unused_part", "missing_caption"))  # a damaged column is one that the row does without
    for name in ("broken JSON without a text", "JSON with half a surrogate")
}
_OF_LINES: Final[Mapping[str, Odd]] = {
    "JSON alone": Odd((), SERVED, (), TEXT),  # the line's own caption is its text
}
DAMAGED_LINES: Final[Mapping[str, str]] = {
    "JSON that ends too early": "bad_json",
    "JSON of a list": "bad_json",
    "JSON with an endless number": "bad_json",
    "broken JSON without a text": "bad_json",
    "JSON with half a surrogate": "not_utf8",
    "text in Latin-1": "not_utf8",
    "text in Latin-1 beside a caption": "not_utf8",
    "text in UTF-16": "not_utf8",
}
"""Samples whose line is damaged with them, so that nobody knows its key; and what is said of it."""


class _Content(NamedTuple):
    """What a sample consists of."""

    images: list[tuple[str, bytes | None] | None]
    """Name and bytes in the order of a list; no bytes where a document names what is not there, None where it has a
    text."""
    text: bytes | None
    document: bytes | None
    is_interleaved: bool


def _content(key: str, odd: Odd) -> _Content:
    last = key.rpartition("/")[2]
    text = next((content for extension, content in odd.members if extension == "txt"), None)
    document = next((content for extension, content in odd.members if extension == "json"), None)
    found = _parsed(document)
    is_interleaved = isinstance(found.get("texts"), list)
    others = ("txt", "json", *_OTHER_MEMBERS)
    stored = [(f"{last}.{extension}", content) for extension, content in odd.members if extension not in others]
    images: list[tuple[str, bytes | None] | None] = []
    if is_interleaved:
        held = dict(stored)
        images += [None if name is None else (name, held.get(name)) for name in found["images"]]
    else:
        stored.sort(key=lambda one: one[0].count("."))  # KEY.jpg goes before KEY.seg.png
        images += stored
    return _Content(images, text, document, is_interleaved)


def _parsed(document: bytes | None) -> dict[str, Any]:
    """The object that a member is, if it is one."""
    try:
        found = json.loads((document or b"").decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _rows(shard: OddShard) -> Iterator[tuple[str, str, Odd]]:
    """Key, name and content of each row or line: all samples, and what follows them in a mixture."""
    for key, name in shard.names.items():
        yield key, name, shard.samples[key]
    text = Odd((("txt", CAPTION),), SERVED)
    yield "000again", "", text
    yield next(key for key in shard.names if key.endswith("001")), "", text


def _judged(shard: OddShard, differences: Mapping[str, Odd]) -> dict[str, Odd]:
    """What must be said of samples, a repeated key included."""
    found = dict(shard.samples)
    for key, name in shard.names.items():
        if name in differences:
            repeated = tuple(kind for kind in found[key].kinds if kind == "duplicate_key")
            found[key] = replace(differences[name], kinds=(*differences[name].kinds, *repeated))
    return found


def as_rows(shard: OddShard, rng: Rng) -> Written:
    """A Parquet file with a list of images in each row; texts and JSON as they are, whether they are UTF-8 or not."""
    keys = [key for key, _, _ in _rows(shard)]
    rows = [_content(key, odd) for key, _, odd in _rows(shard)]
    images = [
        [None if one is None else {"bytes": one[1], "path": one[0]} for one in row.images]
        if row.images or row.is_interleaved
        else None
        for row in rows
    ]
    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    texts, documents = _strings([row.text for row in rows]), _strings([row.document for row in rows])
    table = pa.table([pa.array(keys), texts, documents, pa.array(images, kind)], ["key", "txt", "json", "images"])
    buffer = io.BytesIO()
    pq.write_table(
        table.select(rng.permutation(4).tolist()),
        buffer,
        compression=("none", "snappy", "zstd")[rng.integers(3)],
        use_dictionary=bool(rng.integers(2)),
        row_group_size=int(rng.integers(9, 200)),
        data_page_size=int(rng.integers(1_000, 200_000)),
        data_page_version=("1.0", "2.0")[rng.integers(2)],
        store_schema=bool(rng.integers(2)),
    )
    said = OddShard(samples=_judged(shard, {**_OF_BOTH, **_OF_ROWS}))
    return Written("rows.parquet", {"rows.parquet": buffer.getvalue()}, said)


def _strings(values: list[bytes | None]) -> pa.Array:
    """A column of strings of these bytes."""
    array = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers(), array.null_count)


def as_lines(shard: OddShard, rng: Rng) -> Written:
    """A manifest, with images in files of their own; a damaged text or JSON damages its whole line."""
    said = OddShard(samples=_judged(shard, {**_OF_BOTH, **_OF_LINES}))
    files: Files = {}
    lines: list[bytes] = []
    key_name, text_name = ("key", "__key__")[rng.integers(2)], ("txt", "text")[rng.integers(2)]
    for key, name, odd in _rows(shard):
        found = _content(key, odd)
        paths: list[str | None] = []
        for one in found.images:
            path = one if one is None else one[0]
            if one is not None and one[1] is not None:
                path = f"images/{len(files):03d}.{one[0].rpartition('.')[2]}"
                files[path] = one[1]
            paths.append(path)
        entries = {name: value for name, value in _parsed(found.document).items() if name != "images"}
        entries |= {key_name: key}
        if found.is_interleaved or len(paths) > 1:
            entries["images"] = paths
        elif paths:
            entries["image"] = paths[0]
        if name in DAMAGED_LINES:
            said.kinds.append(DAMAGED_LINES[name])
            _lose(said, key)
            lines.append(_damaged(entries, text_name, found))
            continue
        if found.text is not None:
            entries[text_name] = found.text.decode()
        lines.append(json.dumps(entries, ensure_ascii=bool(rng.integers(2))).encode())
    files["lines.jsonl"] = b"".join(line + b"\n" for line in lines)
    return Written("lines.jsonl", files, said)


def _damaged(entries: Mapping[str, Any], text_name: str, found: _Content) -> bytes:
    """A line with the bytes of a text and of a JSON as they are."""
    if found.document is not None and not found.document.startswith(b"{"):
        return found.document
    line = json.dumps({name: entries[name] for name in entries if name in ("key", "__key__", "image")}).encode()[:-1]
    if found.text is not None:
        line += b', "%s": "%s"' % (text_name.encode(), found.text.replace(b"\n", b" "))
    return line + (b"}" if found.document is None else b", " + found.document[1:])


def _lose(said: OddShard, key: str) -> None:
    """Expect nothing of a key; of one that comes again, what it is then."""
    lost = said.samples.pop(key)
    if "duplicate_key" in lost.kinds:
        said.samples[key] = Odd((), SERVED, (), TEXT)


def as_split(shard: OddShard, rng: Rng) -> Written:
    """The tar among others in a folder that `energon prepare` prepared: a split has it alone."""
    number, is_default = int(rng.integers(3)), bool(rng.integers(2))
    names = [f"parts/{n:03d}.tar" for n in range(3)]
    other = Tar()
    other.add("other.txt", CAPTION)
    files = {name: other.whole() for name in names}
    files[names[number]] = shard.content
    rest = [name for name in names if name != names[number]]
    own = f"{{train: ['parts/{{{number:03d}..{number:03d}}}.tar'], val: [{', '.join(rest)}]}}"
    split = own if is_default else own.replace("train", "odd").replace("val", "train")
    files[".nv-meta/split.yaml"] = f"split_parts: {split}\n".encode()
    return Written(names[number], files, shard, "" if is_default else "#odd", tuple(rest))


WRITERS: Final[Mapping[str, Writer]] = {"rows": as_rows, "lines": as_lines, "split": as_split}
"""By name: writes the samples of a mixture in another format."""
