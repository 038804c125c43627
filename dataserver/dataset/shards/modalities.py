"""What samples hold beside text: a line of `MODALITIES` for each kind of media, in the numbers of an index.

A modality says how a member is recognised, what its header tells before anything is decoded, and what an index may hold
of it. How its size becomes rows is the planner's (`planning/stream/item_sizes.py`), how its bytes become tensors a
decoder's (`assembly/decoders.py`).
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from dataserver.audio import (
    AUDIO_FORMAT_NAMES,
    AUDIO_SUFFIXES,
    MAX_AUDIO_SECONDS,
    MAX_CHANNELS,
    MAX_CLIP_SECONDS,
    SAMPLE_RATES,
    AudioHeader,
    AudioHeaderError,
    audio_format_of,
    read_audio_header,
)
from dataserver.dataset.errors import SampleError
from dataserver.dataset.shards.parts import ImagePart
from dataserver.header_error import HeaderError
from dataserver.images import (
    FORMAT_NAMES,
    IMAGE_SUFFIXES,
    MAX_IMAGE_PIXELS,
    read_header,
    sniff_format,
)
from dataserver.planning.job.fields import MICROSECONDS
from dataserver.video import (
    MAX_FRAME_PIXELS,
    MAX_FRAME_SIDE,
    MAX_VIDEO_FRAMES,
    MAX_VIDEO_SECONDS,
    TEXT_SUFFIXES,
    VIDEO_FORMAT_NAMES,
    VIDEO_SUFFIXES,
    is_text,
    read_sound_header,
    read_video_header,
    video_format_of,
)

Columns = Mapping[str, npt.NDArray[Any]]
Header = TypeVar("Header")
_FIRST_FORMATS: Final = (0, 128, 192)
"""Numbers of the formats of a modality in an index begin with these, in the order of modalities."""


@dataclass(frozen=True, slots=True)
class StoredModality:
    """How an index stores one kind of media."""

    name: str
    """Name of the kind in messages."""
    one: str
    """Name of one item in messages."""
    number: int
    """Number of the modality in plans (`samples.SampleSizes.image_modality`)."""
    ending: str
    """Ending of the names of members that columns of tables hold."""
    too_large: str
    """Kind of finding where one is beyond a limit."""
    suffixes: frozenset[str]
    """Types of files that claim to be of it."""
    matches: Callable[[bytes], bool]
    """Whether a file begins as one of it."""
    read: Callable[[bytes, int], ImagePart] = field(compare=False)
    """What an index holds of a file that lies at an address; SampleError where it is none. It is not compared: videos
    are the same modality with their sound and without."""
    ranges: Mapping[str, tuple[int, int]]
    """Least and greatest value of fields of `ImagePart`."""
    extent: Callable[[Columns], npt.NDArray[np.int64]]
    """What of an item is limited as a whole, from columns of the index."""
    most: int
    """Largest extent of an item."""
    unit: str
    """Unit of `extent`, for messages."""

    def is_claimed(self, suffix: str, content: bytes | None) -> bool:
        """Whether a file claims to be of it by its type; of types that texts have as well, one that is no text.

        Args:
            suffix: its type.
            content: the file; None where it was not read, or is too large.
        """
        return suffix in self.suffixes and not (suffix in TEXT_SUFFIXES and content is not None and is_text(content))


def _header(read: Callable[[bytes], Header], content: bytes) -> Header:
    try:
        return read(content)
    except HeaderError as error:
        raise SampleError(error.kind, error.detail) from error


def _read_image(content: bytes, offset: int) -> ImagePart:
    header = _header(read_header, content)
    return ImagePart(
        offset, len(content), header.width, header.height, header.orientation, FORMAT_NAMES.index(header.format)
    )


def _read_clip(content: bytes, offset: int) -> ImagePart:
    return _clip_part(_header(read_audio_header, content), content, offset)


def _clip_part(header: AudioHeader, content: bytes, offset: int) -> ImagePart:
    number = _FIRST_FORMATS[AUDIO.number] + AUDIO_FORMAT_NAMES.index(header.format)
    return ImagePart(offset, len(content), header.samples, header.sample_rate, header.channels, number)


def _read_video(content: bytes, offset: int) -> ImagePart:
    header = _header(read_video_header, content)
    number = _FIRST_FORMATS[VIDEO.number] + VIDEO_FORMAT_NAMES.index(header.format)
    size = header.width, header.height, header.orientation
    return ImagePart(offset, len(content), *size, number, header.frames, header.microseconds)


def _read_video_with_sound(content: bytes, offset: int) -> ImagePart:
    video = _read_video(content, offset)
    try:
        header = read_sound_header(content)
    except AudioHeaderError as error:
        raise SampleError(error.kind, f"its sound: {error.detail}; or index with --video-sound ignore") from error
    return video if header is None else video._replace(sound=_clip_part(header, content, offset))


def _formats(number: int, names: Sequence[str]) -> tuple[int, int]:
    """The numbers of the first and the last format of a modality."""
    return _FIRST_FORMATS[number], _FIRST_FORMATS[number] + len(names) - 1


IMAGES: Final = StoredModality(
    "images",
    "an image",
    0,
    "img",
    "image_too_large",
    IMAGE_SUFFIXES,
    lambda content: sniff_format(content) is not None,
    _read_image,
    {
        "width": (1, MAX_IMAGE_PIXELS),
        "height": (1, MAX_IMAGE_PIXELS),
        "orientation": (1, 8),
        "format": _formats(0, FORMAT_NAMES),
    },
    lambda fields: fields["width"].astype(np.int64) * fields["height"],
    MAX_IMAGE_PIXELS,
    "pixels",
)
AUDIO: Final = StoredModality(
    "clips",
    "a clip",
    1,
    "clip",
    "audio_too_large",
    AUDIO_SUFFIXES,
    lambda content: audio_format_of(content) is not None,
    _read_clip,
    {
        "width": (1, MAX_AUDIO_SECONDS * SAMPLE_RATES[1]),
        "height": SAMPLE_RATES,
        "orientation": (1, MAX_CHANNELS),
        "format": _formats(1, AUDIO_FORMAT_NAMES),
    },
    lambda fields: -(-fields["width"].astype(np.int64) // fields["height"]),
    MAX_AUDIO_SECONDS,
    "seconds",
)
"""A clip has its samples in `width`, their number in a second in `height`, and its channels in `orientation`."""
VIDEO: Final = StoredModality(
    "videos",
    "a video",
    2,
    "video",
    "video_too_large",
    VIDEO_SUFFIXES,
    lambda content: video_format_of(content) is not None,
    _read_video,
    {
        "width": (1, MAX_FRAME_SIDE),
        "height": (1, MAX_FRAME_SIDE),
        "orientation": (1, 8),
        "format": _formats(2, VIDEO_FORMAT_NAMES),
        "frames": (1, MAX_VIDEO_FRAMES),
        "microseconds": (1, MAX_VIDEO_SECONDS * MICROSECONDS),
    },
    lambda fields: fields["width"].astype(np.int64) * fields["height"],
    MAX_FRAME_PIXELS,
    "pixels",
)
MODALITIES: Final = (IMAGES, AUDIO, VIDEO)
ENDINGS: Final = {modality.ending: modality for modality in MODALITIES}
Media = tuple[StoredModality, ...]
"""Modalities that are parts of samples, in the order in which members are tried: WebM may be sound alone."""
ONLY_IMAGES: Final = (IMAGES,)


def served_media(audio: bool, video: bool, sound: bool = False) -> Media:
    """What is served: images, and what else is asked for; with `sound` videos bring theirs."""
    videos = replace(VIDEO, read=_read_video_with_sound) if sound else VIDEO
    return (IMAGES, *((videos,) if video else ()), *((AUDIO,) if audio else ()))


ALL_MEDIA: Final = served_media(audio=True, video=True)


def media_of(content: bytes, media: Media) -> StoredModality | None:
    """The modality of a file by how it begins; None for anything else."""
    return next((modality for modality in media if modality.matches(content)), None)


def modality_of_suffix(suffix: str, media: Media) -> StoredModality | None:
    """The modality that a file claims to be of by its type; None for any other file."""
    return next((modality for modality in media if suffix in modality.suffixes), None)


def modality_of_part(part: ImagePart) -> StoredModality:
    """The modality of a part of a sample."""
    return MODALITIES[bisect_right(_FIRST_FORMATS, part.format) - 1]


def is_long_clip(part: ImagePart) -> bool:
    """Whether a part of a sample is a clip that is longer than any job reads."""
    return modality_of_part(part) is AUDIO and part.width > MAX_CLIP_SECONDS * part.height


def modality_of_format(number: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The number of the modality that each format of an index is of. uint8 [m]."""
    return (np.searchsorted(_FIRST_FORMATS, number, "right") - 1).astype(np.uint8)
