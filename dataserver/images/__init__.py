"""Encoded images: bytes in, patches out. `formats` has a line for each format that is read."""

from dataserver.images.decoding import (
    ImageFault,
    ImageShape,
    decode_patches,
    fault_of,
    silence_pillow_warnings,
    write_scaled_patches,
)
from dataserver.images.errors import ImageHeaderError
from dataserver.images.formats import FORMAT_NAMES, IMAGE_SUFFIXES, sniff_format
from dataserver.images.header import ImageHeader, read_header
from dataserver.images.limits import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS
from dataserver.images.patches import U8, write_patches
from dataserver.images.transforms import TRANSFORM_WORDS, DrawnTransform, transform
from dataserver.images.unsupported_formats import OTHER_SUFFIXES

__all__ = [
    "FORMAT_NAMES",
    "IMAGE_SUFFIXES",
    "MAX_IMAGE_BYTES",
    "MAX_IMAGE_PIXELS",
    "OTHER_SUFFIXES",
    "TRANSFORM_WORDS",
    "U8",
    "DrawnTransform",
    "ImageFault",
    "ImageHeader",
    "ImageHeaderError",
    "ImageShape",
    "decode_patches",
    "fault_of",
    "read_header",
    "silence_pillow_warnings",
    "sniff_format",
    "transform",
    "write_patches",
    "write_scaled_patches",
]
