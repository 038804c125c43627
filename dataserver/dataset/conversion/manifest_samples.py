"""The lines of a JSONL manifest as samples of a tar: what they say, and the image files that they name.

Paths are relative to the manifest and never leave its folder. A line that cannot be used is a finding, and so is a file
that is missing; its sample is written with what it has.
"""

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

from dataserver.dataset.conversion.tar_samples import tar_key, tar_sample
from dataserver.dataset.conversion.tar_writer import Members
from dataserver.dataset.errors import DatasetError, Findings, SampleError, printable
from dataserver.dataset.shards.interface import MAX_MEMBER_BYTES
from dataserver.dataset.shards.members import MAX_TEXT_BYTES, parse_document
from dataserver.dataset.shards.parquet.rows import CAPTION_NAMES, KEY_NAMES, Row, row_members
from dataserver.dataset.storage.interface import Storage
from dataserver.dataset.storage.registry import storage_of

IMAGE_NAMES: Final = ("image", "images", "file_name", "image_path", "jpg")
"""The first of these that a line has as text or a list names its images."""
MAX_LINE_BYTES: Final = 1 << 30
"""Of all images of one line, which are in memory at a time."""


class _Images(NamedTuple):
    """What a line has of images, as a column has it."""

    name: str
    is_list: bool


def manifest_samples(path: Path, findings: Findings) -> Iterator[Members]:
    """Yield the members of each line, in order.

    Args:
        path: the manifest.
        findings: where lines and images are counted that cannot be used.

    Raises:
        OSError: storage failed.
    """
    storage = storage_of(path)
    keys: set[str] = set()
    number = 0
    with storage.open(path) as file:
        while line := file.readline(MAX_TEXT_BYTES + 1):
            if len(line) > MAX_TEXT_BYTES:
                findings.add("", "text_too_large", f"line {number + 1} has more than {MAX_TEXT_BYTES} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_TEXT_BYTES)
            elif line.strip():
                try:
                    document = parse_document(line.decode("utf-8-sig"))
                except SampleError as error:
                    findings.add("", error.kind, f"line {number + 1}: {error.detail}")
                except UnicodeDecodeError as error:
                    findings.add("", "not_utf8", f"line {number + 1}: byte {error.start} is not UTF-8")
                else:
                    yield from _line(storage, path.parent, number, document, keys, findings)
            number += 1


def _line(
    storage: Storage, root: Path, number: int, document: dict[str, Any], keys: set[str], findings: Findings
) -> Iterator[Members]:
    """Yield the sample of one line, if it has a key of its own."""
    name = next((name for name in IMAGE_NAMES if isinstance(document.get(name), str | list)), IMAGE_NAMES[0])
    held = document.pop(name, None)
    given = held if isinstance(held, list) else [] if held is None else [held]
    images: list[bytes | SampleError | None] = []
    left = MAX_LINE_BYTES
    for one in given:
        images.append(image := _image(storage, root, one, min(left, MAX_MEMBER_BYTES)))
        left -= len(image) if isinstance(image, bytes) else 0
    caption, key = _taken(document, CAPTION_NAMES), tar_key(_taken(document, KEY_NAMES))
    text = SampleError("missing_caption", "the line has no text") if caption is None else caption.encode()
    column = _Images(name, isinstance(held, list))
    members = [*row_members(number, Row(key, text, document, [None]), [column], [images], keys, findings)]
    if sample := tar_sample(members, findings):
        yield sample


def _taken(document: dict[str, Any], names: Sequence[str]) -> str | None:
    """Take the first of these entries that is text out of a line."""
    name = next((name for name in names if isinstance(document.get(name), str)), None)
    found: str | None = None if name is None else document.pop(name)
    return found


def _image(storage: Storage, root: Path, name: object, max_bytes: int) -> bytes | SampleError | None:
    """Read a file that a line names; None where it names none, as in the list of a document."""
    if name is None:
        return None
    shown = printable(str(name), 80)
    if not isinstance(name, str) or not name or "\0" in name:
        return SampleError("missing_image", f"{shown!a} is no name of a file")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "://" in name:
        return SampleError("missing_image", f"{shown!a} leaves the folder of the manifest; give a path below it")
    try:
        storage.check(root, name)
        with storage.open(root / name) as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            limits = f"limits are {MAX_MEMBER_BYTES}, and {MAX_LINE_BYTES} for all images of a line"
            return SampleError("image_too_large", f"{shown!a} has more than {max_bytes} bytes; {limits}")
        return content
    except DatasetError as error:
        return SampleError("missing_image", str(error))
    except OSError as error:
        if error.errno not in (None, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR):
            raise  # storage failed
        return SampleError("missing_image", f"{shown!a} is no file below the folder of the manifest")
