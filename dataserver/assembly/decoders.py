"""From stored bytes to the rows of a view's tensor: a function for each modality, by its number.

A decoder fills the rows of one item and says whether its bytes are usable: a pure function of its arguments.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataserver.audio import AudioShape, ReadMono, audio_fault_of, audio_format_of, decode_mel
from dataserver.dataset import ImageRef
from dataserver.images import DrawnTransform, ImageFault, ImageShape, decode_patches, sniff_format
from dataserver.images import fault_of as image_fault_of
from dataserver.planning.job.fields import Sizing, served_frames
from dataserver.planning.stream.item_sizes import audio_sizing, video_sizing
from dataserver.planning.stream.samples import AUDIO, IMAGE, VIDEO
from dataserver.video import FrameGrid, VideoShape, decode_frames, read_sound, video_fault_of, video_format_of


class Item(NamedTuple):
    """What a plan says of an image, a clip or a video."""

    rows: int
    columns: int
    """Columns of its grid, as in `StepSamples`."""
    drawn: tuple[DrawnTransform, ...]
    """The transforms that were drawn for an image."""
    tiles: tuple[int, int] = (0, 0)
    """Rows and columns of tiles that an image is cut into."""
    depth: int = 1
    """Groups of frames of a video."""


Array = NDArray[Any]
Decode = Callable[[bytes, ImageRef, Item, Sizing, Array | None], bool]
"""Bytes, what the index and the plan say of them, sizing, and the rows to fill: None where the verdict alone counts."""


def _decode_image(data: bytes, ref: ImageRef, item: Item, sizing: Sizing, out: Array | None) -> bool:
    if out is None:
        out = np.empty((item.rows * item.columns, sizing.patch**2 * 3), np.uint8)
    shape = ImageShape(
        ref.width, ref.height, ref.orientation, item.rows, item.columns, ref.may_be_truncated, item.tiles
    )
    return decode_patches(data, shape, sizing, out, item.drawn)


def _decode_clip(data: bytes, ref: ImageRef, item: Item, sizing: Sizing, out: Array | None) -> bool:
    audio = audio_sizing(sizing)
    if out is None:
        out = np.empty((served_frames(item.columns, audio), audio.bins), np.float32)
    return decode_mel(data, AudioShape(ref.width, ref.height, ref.orientation), audio, out, _sound_reader(data))


def _sound_reader(data: bytes) -> ReadMono | None:
    """What reads the samples of a clip that is the sound of a video; None for a clip of its own."""
    return None if video_format_of(data) is None else read_sound


def _decode_video(data: bytes, ref: ImageRef, item: Item, sizing: Sizing, out: Array | None) -> bool:
    video = video_sizing(sizing)
    if out is None:
        out = np.empty((item.rows * item.columns, video.temporal_patch * sizing.patch**2 * 3), np.uint8)
    grid = FrameGrid(item.depth, item.rows // item.depth, item.columns)
    return decode_frames(data, _video_shape(ref), grid, sizing.of_frames, video, out)


def _video_shape(ref: ImageRef) -> VideoShape:
    return VideoShape(ref.frames, ref.microseconds, ref.width, ref.height, ref.orientation)


DECODERS: Final[Mapping[int, Decode]] = MappingProxyType(
    {IMAGE: _decode_image, AUDIO: _decode_clip, VIDEO: _decode_video}
)
"""Decoding functions by the number of what the item is (`ImageRef.modality`)."""


def fault_of(data: bytes, ref: ImageRef) -> ImageFault | None:
    """Say why servers deliver an item as invalid, or only a part of it; None where they deliver it whole."""
    if ref.is_image:
        return image_fault_of(data, ref)
    if ref.is_audio:
        why = audio_fault_of(data, AudioShape(ref.width, ref.height, ref.orientation), _sound_reader(data))
    else:
        why = video_fault_of(data, _video_shape(ref))
    return None if why is None else ImageFault(why, is_served=False)


def format_name(data: bytes, ref: ImageRef, unknown: str) -> str:
    """The name of the format of an item's bytes; `unknown` where they are of none that is known."""
    if ref.is_image:
        return sniff_format(data) or unknown
    found = (audio_format_of(data) if ref.is_audio else None) or video_format_of(data)  # or of the video of a sound
    return unknown if found is None else found.name
