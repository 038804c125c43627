"""Files of named arrays: what can be made again at any time, kept because that takes time.

One line of text, `disttrain arrays 2 CRC-32C`, then one of JSON that describes the rest: what the file is about, and
name, type and shape of each array; then the bytes of all arrays, the widest numbers first. The checksum covers all that
follows the first line, so that a file which is cut, damaged or half written is never taken for a whole one.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as crc32c_of

from dataserver.dataset.index.format import atomic_writer
from dataserver.dataset.storage.etags import check_regular

Array = npt.NDArray[Any]

MAX_FILE_BYTES: Final = 4 << 30
"""Largest file that is read: all of it is in memory then."""
MAX_ABOUT_BYTES: Final = 1 << 20
"""Largest description of a file that is read without the rest."""
_MAGIC: Final = b"disttrain arrays 2 "
_FIRST_LINE: Final = len(_MAGIC) + 8 + 1
_ALIGNED: Final = 64
"""The arrays begin at multiples of so many bytes behind the first line: numpy takes twice as long elsewhere."""
_TYPES: Final = frozenset({"|u1", "<i4", "<i8"})


class ArraysError(ValueError):
    """A file that is not what was written as it; make it again."""


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write a file atomically.

    Args:
        path: the file.
        about: what JSON can say.
        arrays: uint8, int32 or int64, of any shape.

    Raises:
        DatasetError: it cannot be written.
    """
    widest_first = sorted(arrays.items(), key=lambda item: -item[1].itemsize)  # so that all are aligned
    stored = {name: a.astype(a.dtype.newbyteorder("<"), copy=False) for name, a in widest_first}
    shapes = [[name, a.dtype.str, list(a.shape)] for name, a in stored.items()]
    content = json.dumps({"about": about, "arrays": shapes}).encode("ascii")
    padding = b" " * (-(len(content) + 1) % _ALIGNED)
    parts = [content + padding + b"\n", *(a.tobytes() for a in stored.values())]
    crc = 0
    for part in parts:
        crc = crc32c_of(part, crc)
    with atomic_writer(path) as temp, temp.open("wb") as file:
        file.write(_first_line(crc))
        for part in parts:
            file.write(part)


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Read a file: what it is about, and its arrays, read-only.

    Raises:
        FileNotFoundError, NotADirectoryError: it is not there.
        ArraysError: it cannot be read, or is not what was written.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"it has {size} bytes, the limit is {MAX_FILE_BYTES}")
        head, rest = file.read(_FIRST_LINE), file.read(size)
        if head != _first_line(crc32c_of(rest)):
            raise ValueError("it is damaged, was not written to its end, or is of another release")
        return _parse(rest, rest.index(b"\n") + 1)


def read_about(path: Path) -> dict[str, Any]:
    """What a file is about, from its beginning, if its arrays end where it does; its checksum is not looked at.

    Raises:
        FileNotFoundError, NotADirectoryError: it is not there.
        ArraysError: it cannot be read, or was not written to its end.
    """
    with _opened(path) as file:
        if not file.read(_FIRST_LINE).startswith(_MAGIC):
            raise ValueError("it holds no arrays")
        content = json.loads(file.readline(MAX_ABOUT_BYTES))
        end = file.tell() + sum(np.dtype(kind).itemsize * prod(shape) for _, kind, shape in content["arrays"])
        if end != os.fstat(file.fileno()).st_size:
            raise ValueError("it was not written to its end")
        return dict(content["about"])


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Yield a file that is read; what is wrong with it is an `ArraysError`, unless it is not there."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ArraysError(str(error)) from error


def _first_line(crc: int) -> bytes:
    return b"%s%08x\n" % (_MAGIC, crc)


def _parse(data: bytes, start: int) -> tuple[dict[str, Any], dict[str, Array]]:
    content = json.loads(data[:start])
    arrays: dict[str, Array] = {}
    for name, kind, shape in content["arrays"]:
        if kind not in _TYPES or any(type(side) is not int or side < 0 for side in shape):
            raise ValueError(f"its array {name!a} is {kind!a} {shape!a}")
        count = prod(shape)
        arrays[name] = np.frombuffer(data, np.dtype(kind), count, start).reshape(shape)
        start += arrays[name].nbytes
    if start != len(data):
        raise ValueError(f"its arrays end at byte {start} of {len(data)}")
    about: dict[str, Any] = dict(content["about"])
    return about, arrays
