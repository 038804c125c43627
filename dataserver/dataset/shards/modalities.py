"""What samples hold beside text: a line of `MODALITIES` for each kind of media, in the numbers of an index.

A modality says how a member is recognised, what its header tells before anything is decoded, and what an index may hold
of it. How its size becomes rows is the planner's (`planning/stream/item_sizes.py`), how its bytes become tensors a
decoder's (`assembly/decoders.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataserver.audio import (
    AUDIO_FORMAT_NAMES,
    AUDIO_SUFFIXES,
    MAX_AUDIO_SECONDS,
    MAX_CHANNELS,
    MAX_CLIP_SECONDS,
    SAMPLE_RATES,
    AudioHeaderError,
    audio_format_of,
    read_audio_header,
)
from dataserver.dataset.errors import SampleError
from dataserver.dataset.shards.parts import ImagePart
from dataserver.images import (
    FORMAT_NAMES,
    IMAGE_SUFFIXES,
    MAX_IMAGE_PIXELS,
    ImageHeaderError,
    read_header,
    sniff_format,
)

Columns = Mapping[str, npt.NDArray[Any]]
_FORMAT_BITS: Final = 7
"""Of a format's number in an index that tell a modality's formats apart; the bit above tells the modality."""


@dataclass(frozen=True, slots=True)
class StoredModality:
    """One kind of media."""

    name: str
    """For messages."""
    one: str
    """One of them."""
    number: int
    """Of the modality in plans (`samples.SampleSizes.image_modality`)."""
    suffixes: frozenset[str]
    """Types of files that claim to be of it."""
    matches: Callable[[bytes], bool]
    """Whether a file begins as one of it."""
    read: Callable[[bytes, int], ImagePart]
    """What an index holds of a file that lies at an address; SampleError where it is none."""
    ranges: Mapping[str, tuple[int, int]]
    """Least and greatest value of fields of `ImagePart`."""
    extent: Callable[[Columns], npt.NDArray[np.int64]]
    """What of an item is limited as a whole, from columns of the index."""
    most: int
    """Greatest extent."""
    unit: str
    """Of the extent."""


def _read_image(content: bytes, offset: int) -> ImagePart:
    try:
        header = read_header(content)
    except ImageHeaderError as error:
        raise SampleError(error.kind, error.detail) from error
    return ImagePart(
        offset, len(content), header.width, header.height, header.orientation, FORMAT_NAMES.index(header.format)
    )


def _read_clip(content: bytes, offset: int) -> ImagePart:
    try:
        header = read_audio_header(content)
    except AudioHeaderError as error:
        raise SampleError(error.kind, error.detail) from error
    number = AUDIO.number << _FORMAT_BITS | AUDIO_FORMAT_NAMES.index(header.format)
    return ImagePart(offset, len(content), header.samples, header.sample_rate, header.channels, number)


IMAGES: Final = StoredModality(
    "images",
    "an image",
    0,
    IMAGE_SUFFIXES,
    lambda content: sniff_format(content) is not None,
    _read_image,
    {
        "width": (1, MAX_IMAGE_PIXELS),
        "height": (1, MAX_IMAGE_PIXELS),
        "orientation": (1, 8),
        "format": (0, len(FORMAT_NAMES) - 1),
    },
    lambda fields: fields["width"].astype(np.int64) * fields["height"],
    MAX_IMAGE_PIXELS,
    "pixels",
)
AUDIO: Final = StoredModality(
    "clips",
    "a clip",
    1,
    AUDIO_SUFFIXES,
    lambda content: audio_format_of(content) is not None,
    _read_clip,
    {
        "width": (1, MAX_AUDIO_SECONDS * SAMPLE_RATES[1]),
        "height": SAMPLE_RATES,
        "orientation": (1, MAX_CHANNELS),
        "format": (1 << _FORMAT_BITS, (1 << _FORMAT_BITS) + len(AUDIO_FORMAT_NAMES) - 1),
    },
    lambda fields: -(-fields["width"].astype(np.int64) // fields["height"]),
    MAX_AUDIO_SECONDS,
    "seconds",
)
"""A clip has its samples in `width`, their number in a second in `height`, and its channels in `orientation`."""
MODALITIES: Final = (IMAGES, AUDIO)


def media_of(content: bytes, serves_audio: bool) -> StoredModality | None:
    """The modality of a file by how it begins; None for anything else."""
    known = MODALITIES if serves_audio else MODALITIES[:1]
    return next((modality for modality in known if modality.matches(content)), None)


def modality_of_part(part: ImagePart) -> StoredModality:
    """The modality of a part of a sample."""
    return MODALITIES[part.format >> _FORMAT_BITS]


def is_long_clip(part: ImagePart) -> bool:
    """Whether a part of a sample is a clip that is longer than any job reads."""
    return modality_of_part(part) is AUDIO and part.width > MAX_CLIP_SECONDS * part.height


def modality_of_format(number: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The number of the modality that each format of an index is of. uint8 [m]."""
    return (number >> _FORMAT_BITS).astype(np.uint8)
