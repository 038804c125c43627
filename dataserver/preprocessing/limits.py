"""Limits on what is decoded, in bytes and pixels, never in time.

They are constants of the code and no settings: whether an image is valid is a pure function of its stored bytes, the
same on every server of a fleet.
"""

from typing import Final

from dataserver.dataset import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS

MAX_ENCODED_BYTES: Final = MAX_IMAGE_BYTES
"""Largest encoded image: the index leaves out larger ones already."""

MAX_PIXELS: Final = MAX_IMAGE_PIXELS
"""Most pixels of one image: the index leaves out larger ones already."""

DECODER_BYTES_PER_PIXEL: Final = 16
"""Most memory of one decode: 4 bytes in Pillow, and 12 in libwebp or 8 in libjpeg (progressive CMYK). Together with
MAX_PIXELS that is 2 GB for the largest image."""

MAX_SCANNED_PIXELS: Final = 1 << 31
"""Most pixels x scans of one JPEG, 16 scans of the largest image. A progressive file of a few kilobytes can hold
thousands of scans, each of which walks over the whole image; cameras and encoders write about ten."""

MAX_TOKENIZER_BYTES: Final = 256 << 20
"""Largest tokenizer file; the largest published vocabularies take about 35 MB."""

MAX_TEXT_BATCH_BYTES: Final = 16 << 20
"""UTF-8 bytes that are tokenized in one call: bounds the memory while a dataset is counted."""
