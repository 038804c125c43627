"""What lies where a file of a checkpoint should: downloads that are a pointer, a page, a part, or nothing."""

import json
import re
import struct
from pathlib import Path
from typing import Any, Final

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header of a safetensors file; its own library takes no more."""
_LENGTH: Final = struct.Struct("<Q")
_PEEK_BYTES: Final = 512
_SHOWN: Final = 40
_AGAIN: Final = "download it again"
_POINTER: Final = b"version https://git-lfs"
_MAGIC: Final = {
    b"PK\x03\x04": "a zip archive, as torch.save makes of pickles, which are never read; take safetensors",
    **dict.fromkeys(
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle, which is never read; take safetensors"
    ),
    b"\x1f\x8b": "compressed by gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; unpack it",
    b"GGUF": "of GGUF, for inference; take the original checkpoint, as safetensors",
}


class TwiceError(ValueError):
    """An object of JSON that gives a name twice."""


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads` (object_pairs_hook): an object whose names all differ; raises TwiceError otherwise."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise TwiceError(f"it gives {twice!r:.100} twice; each name must stand once")
    return found


def not_the_file(path: Path) -> str:
    """What a file is that is none of a checkpoint, and what to do; empty where nothing is known against it.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        first = file.read(_PEEK_BYTES)
    if not first:
        return f"it is empty; {_AGAIN}"
    if first.startswith(_POINTER):
        size = re.search(rb"^size (\d{1,20})$", first, re.MULTILINE)
        what = f", which stands for {int(size[1])} bytes" if size else ""
        return f"it is a pointer of git-lfs{what}; run `git lfs pull` in its repository, or {_AGAIN}"
    start = first.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"<"):
        return f"it is a page ({_text(start)!r}), as downloads that were refused leave behind; {_AGAIN}"
    magic = next((what for magic, what in _MAGIC.items() if first.startswith(magic)), "")
    return f"it is {magic}" if magic else ""


def is_pointer(path: Path) -> bool:
    """Whether a file stands for one that git-lfs keeps; OSError where it cannot be read."""
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def not_safetensors(path: Path) -> str:
    """Why a file cannot be read as safetensors, as far as its beginning and its size tell; empty where they do not.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_LENGTH.size + 1)
        length = _LENGTH.unpack(first[:-1])[0] if len(first) > _LENGTH.size else 0
        if not (2 <= length <= MAX_HEADER_BYTES and first.endswith(b"{")):
            start = _text(first + file.read(_SHOWN))
            return not_the_file(path) or f"it begins with {start!r}, not with a header; {_AGAIN}"
        text = b"{" + file.read(length - 1)
    if len(text) < length:
        return f"it is cut: {size} bytes, and its header alone has {length}; {_AGAIN}"
    try:
        header = json.loads(text, object_pairs_hook=once)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        described = _LENGTH.size + length + max(ends, default=0)
    except TwiceError as error:
        return str(error)
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return ""  # the library says what is wrong with it
    if size < described:
        return f"it is cut: {size} bytes, and its header describes {described}; {_AGAIN}"
    if size > described:
        return f"it has {size} bytes, and its header describes {described}; {_AGAIN}"
    return ""


def _text(data: bytes) -> str:
    """The first line, as far as it is shown."""
    return data.decode("utf-8", "replace").strip().splitlines()[0][:_SHOWN] if data.strip() else ""
