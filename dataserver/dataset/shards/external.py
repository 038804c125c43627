"""Images of a shard that lie in other files: in files of their own, or in members of tars.

Their addresses lie behind the last byte of the shard, one image after the other in the order of the shard, so that an
image has one offset and one length wherever it lies. Each has a checksum, which is compared whenever it is read.
"""

import errno
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c as crc32c_of

from dataserver.dataset.errors import DatasetError, Findings, SampleError, TarError
from dataserver.dataset.shards.hashing import HashingReader
from dataserver.dataset.shards.members import MAX_MEMBER_BYTES
from dataserver.dataset.shards.modalities import IMAGES, ONLY_IMAGES, Media, StoredModality, media_of
from dataserver.dataset.shards.parts import ExternalPart, ImagePart
from dataserver.dataset.shards.tar import scan_members
from dataserver.dataset.storage.etags import Etag
from dataserver.dataset.storage.registry import storage_of

MAX_EXTERNAL: Final = 1 << 22
"""Images in other files of one shard."""
_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.EINVAL)
_NONE: Final = Etag(0, 0, -1, 0, 0)
"""Stands for the state of a file that is not there."""
MAX_TARS: Final = 1 << 10
"""Tars that one manifest may name members of."""


class ExternalFiles:
    """Collects the images of one shard while it is read."""

    def __init__(self, root: Path, shard_bytes: int, media: Media = ONLY_IMAGES) -> None:
        """Begin.

        Args:
            root: what the names of files are relative to, and what none of them leaves.
            shard_bytes: size of the shard, where addresses begin.
            media: what files may be.
        """
        self.root = root
        self._media = media
        self.parts: list[ExternalPart] = []
        self._next_address = shard_bytes
        self._digest = hashlib.sha256()
        self._tars: dict[str, tuple[Etag, dict[str, tuple[int, int]]] | SampleError] = {}
        """What tars hold, or why they cannot be read."""

    @property
    def digest(self) -> str:
        """SHA-256 over the bytes of all images, hexadecimal; empty where there is none."""
        return self._digest.hexdigest() if self.parts else ""

    def read(self, name: str, expected: StoredModality = IMAGES) -> tuple[bytes, ExternalPart]:
        """Read a file, or the member of a tar that is named as `FOLDER/NAME.tar/MEMBER`.

        Args:
            name: of the file.
            expected: what it claims to be, for the finding where it is too large.

        Raises:
            SampleError: it is too large, or no such member.
            DatasetError: it lies outside of the root, behind a link.
            OSError: it is not there, or storage failed.
        """
        file_name, member = _split(name)
        path = self.root / file_name
        storage = storage_of(path)
        storage.check(self.root, file_name)
        if member:
            etag, members = self._members(file_name)
            if member not in members:
                raise SampleError("missing_image", f"{file_name[:80]!a} has no member {member[:80]!a}")
            offset, length = members[member]
        else:
            etag = storage.etag(str(path))
            offset, length = 0, etag.num_bytes
        if length > MAX_MEMBER_BYTES:
            raise SampleError(expected.too_large, f"{name[:80]!a} has {length} bytes, limit {MAX_MEMBER_BYTES}")
        (content,) = storage.ranges(path).read([(offset, length)])
        if len(content) < length:
            raise OSError(f"{path} ends after {offset + len(content)} bytes, it had {offset + length}")
        crc = crc32c_of(content)
        return content, ExternalPart(file_name, offset, length, crc, etag.num_bytes, etag.mtime_ns, etag.ctime_ns)

    def _members(self, name: str) -> tuple[Etag, dict[str, tuple[int, int]]]:
        """Where the members of a tar lie; it is read for the first of them."""
        if name not in self._tars:
            if len(self._tars) >= MAX_TARS:
                raise SampleError("missing_image", f"{name[:80]!a} is beyond the {MAX_TARS} tars of one manifest")
            path = self.root / name
            storage = storage_of(path)
            etag = storage.etag(str(path))
            members: dict[str, tuple[int, int]] = {}
            with storage.open(path) as file:
                try:
                    for found in scan_members(HashingReader(file, etag.num_bytes, sha256=""), Findings()):
                        if not found.special:
                            members.setdefault(found.name, (found.offset, found.length))
                    self._tars[name] = etag, members
                except TarError as error:
                    self._tars[name] = SampleError("missing_image", f"{name[:80]!a} cannot be read: {error.detail}")
        found_tar = self._tars[name]
        if isinstance(found_tar, SampleError):
            raise SampleError(found_tar.kind, found_tar.detail)
        return found_tar

    def image(self, content: bytes, part: ExternalPart, expected: StoredModality = IMAGES) -> ImagePart:
        """Read what an external file is, and note it as a part of the shard.

        What begins as no image, clip or video is refused in the words of `expected`.

        Raises:
            SampleError: it cannot be used, or there are too many.
        """
        try:
            found = (media_of(content, self._media) or expected).read(content, self._next_address)
        except SampleError as error:
            raise SampleError(error.kind, f"{part.name[:80]}: {error.detail}") from error
        if len(self.parts) >= MAX_EXTERNAL:
            raise SampleError("missing_image", f"beyond the {MAX_EXTERNAL} images of one shard; split it")
        self._next_address += part.length
        self.parts.append(part)
        self._digest.update(content)
        return found

    def note_read(self, part: ExternalPart) -> None:
        """Note a file that was read and is no image of the shard, so that it is read again when it changes.

        Raises:
            SampleError: there are too many files.
        """
        if len(self.parts) >= MAX_EXTERNAL:
            raise SampleError("missing_image", f"beyond the {MAX_EXTERNAL} files of one shard; split it")
        self.parts.append(part._replace(length=0))

    def note_unusable(self, name: str) -> None:
        """Note a file that cannot be used, so that an index is made again once it has changed. Raises OSError."""
        file_name = _split(name)[0]
        state = file_state(self.root, file_name)
        if len(self.parts) < MAX_EXTERNAL:
            self.parts.append(ExternalPart(file_name, 0, 0, 0, *state))


def is_gone(error: OSError) -> bool:
    """Whether an error says that a file is not there, or is none; all else is storage that failed."""
    return error.errno is None or error.errno in _GONE


def file_state(root: Path, name: str) -> tuple[int, int, int]:
    """Return size, mtime and ctime of a file as a table notes them; -1 bytes where it is not there.

    Raises:
        OSError: storage failed.
    """
    path = root / name
    try:
        etag = storage_of(path).etag(str(path))
    except OSError as error:
        if not is_gone(error):
            raise
        etag = _NONE
    return etag.num_bytes, etag.mtime_ns, etag.ctime_ns


def _split(name: str) -> tuple[str, str]:
    """The file that a name names, and the member of it that follows the name of a tar."""
    tar, inside, member = name.partition(".tar/")
    return (f"{tar}.tar", member) if inside else (name, "")


class ExternalTable:
    """Finds the image of an address."""

    def __init__(self, root: Path, parts: Sequence[ExternalPart], shard_bytes: int) -> None:
        self.root = root
        self.parts = parts
        sizes = np.array([part.length for part in parts], np.int64)
        self._starts: npt.NDArray[np.int64] = shard_bytes + np.cumsum(sizes) - sizes

    def find(self, address: int, length: int) -> ExternalPart:
        """Return the image at an address. Raises IndexError where there is none of that length."""
        number = int(np.searchsorted(self._starts, address, "right")) - 1
        if number < 0 or self._starts[number] != address or self.parts[number].length != length:
            raise IndexError(f"{length} bytes at {address}")
        return self.parts[number]

    def changed_text(self) -> Path | None:
        """The first text with another content than when it was read. Raises OSError."""
        texts = (part for part in self.parts if part.length == 0 and part.crc32c)
        return next((self.root / part.name for part in texts if not self._is_as_read(part)), None)

    def _is_as_read(self, part: ExternalPart) -> bool:
        """Whether a file has the content that was read. Raises OSError."""
        path = self.root / part.name
        storage = storage_of(path)
        try:
            storage.check(self.root, part.name)
            size = storage.etag(str(path)).num_bytes
            if size != part.file_bytes:
                return False
            (content,) = storage.ranges(path).read([(0, size)])
        except DatasetError:  # behind a link by now
            return False
        except OSError as error:
            if not is_gone(error):
                raise
            return False
        return crc32c_of(content) == part.crc32c

    def changed_file(self) -> Path | None:
        """The first file that is not as it was when its images were read, by size and times. Raises OSError."""
        seen = set[tuple[str, int, int, int]]()
        for part in self.parts:
            state = (part.name, part.file_bytes, part.mtime_ns, part.ctime_ns)
            if state in seen:
                continue
            seen.add(state)
            if file_state(self.root, part.name) != state[1:]:
                return self.root / part.name
        return None
