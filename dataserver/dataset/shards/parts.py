"""What samples consist of, in the numbers of an index. Apart from what reads them: servers need no more of it."""

from typing import Final, NamedTuple, Self

from dataserver.dataset.errors import SampleError

TEXT: Final = 0
IMAGE: Final = 1
"""The kinds of a sample's parts."""
Scalar = bool | int | float | str
"""Entry of a sample's JSON, or of a sidecar, that filters can ask for."""


class ExternalPart(NamedTuple):
    """One image in another file than the shard; its fields are the columns of a stored table."""

    name: str
    """Name of the file, relative to a root, with slashes."""
    offset: int
    length: int
    crc32c: int
    file_bytes: int
    mtime_ns: int
    ctime_ns: int


class ImagePart(NamedTuple):
    """One image in a shard: position in bytes, upright size in pixels, EXIF orientation, index into `FORMAT_NAMES`.

    Its fields but the last are those of `columns.MEDIA_TYPE`, in that order; an index without videos has those of
    `IMAGE_TYPE`.
    """

    offset: int
    """Or an address: beyond the shard in one of its decompressed pages (`pages.py`), or as `joined_address`."""
    length: int
    width: int
    height: int
    orientation: int
    format: int
    frames: int = 0
    """Number of frames in a video, or 0 for an image or a clip."""
    microseconds: int = 0
    """Microseconds that the frames of a video take."""
    sound: "ImagePart | None" = None
    """The clip that a video's sound is, in the same bytes, where it is a part of the sample too."""

    def in_joined(self, number: int) -> Self:
        """Return the image where it lies in a joined file instead of the shard."""
        sound = None if self.sound is None else self.sound.in_joined(number)
        return self._replace(offset=joined_address(number, self.offset), sound=sound)

    def with_sound(self) -> "tuple[ImagePart, ...]":
        """Return the parts of a sample that it becomes: itself, and its sound directly behind it."""
        return (self,) if self.sound is None else (self._replace(sound=None), self.sound)


_FILE_BITS: Final = 52
"""Bits of an address that hold an offset; those above hold the number of a file, 0 for the shard and its pages."""
JOINED_START: Final = 1 << _FILE_BITS
"""The first address in a joined file."""


def joined_address(number: int, offset: int) -> int:
    """Return the address of a byte in the joined file of a number, which counts from 1."""
    return (number << _FILE_BITS) + offset


def split_address(address: int) -> tuple[int, int]:
    """Return the number of the file that an address lies in, and the offset there."""
    return address >> _FILE_BITS, address & (JOINED_START - 1)


class JoinedFile(NamedTuple):
    """A joined file that holds images."""

    number: int
    """Number of the file among all that are joined to the shard, from 1."""
    num_bytes: int
    sha256: str


Value = ImagePart | SampleError | None
"""An image, why it is none, or None where nothing claims to be one."""
