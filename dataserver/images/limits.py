"""Limits on what is decoded, in bytes and pixels, never in time.

They are constants of the code and no settings: whether an image is valid is a pure function of its stored bytes, the
same on every server of a fleet.
"""

from typing import Final

MAX_IMAGE_BYTES: Final = 64 << 20
"""Most bytes that an encoded image may have."""

MAX_IMAGE_PIXELS: Final = 1 << 27
"""Width x height of one image, 0.4 GB of RGB. It lies below the 178,956,970 pixels at which some of Pillow's readers
refuse an image of their own accord, so no version of Pillow decides."""

DECODER_BYTES_PER_PIXEL: Final = 16
"""Most memory of one decode: 4 bytes in Pillow, and 12 in libwebp or 8 in libjpeg (progressive CMYK). Together with
MAX_IMAGE_PIXELS that is 2 GB for the largest image."""

MAX_SCANNED_PIXELS: Final = 1 << 31
"""Most pixels x scans of one JPEG, 16 scans of the largest image. A progressive file of a few kilobytes can hold
thousands of scans, and each walks over the whole image; cameras and encoders write about ten."""
