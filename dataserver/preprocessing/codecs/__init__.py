"""Encoded images to patches: one function, bytes in, patches out."""

from dataserver.preprocessing.codecs.decoding import (
    ImageShape,
    decode_patches,
    silence_pillow_warnings,
    undecodable,
)
from dataserver.preprocessing.codecs.patches import U8, write_patches

__all__ = ["U8", "ImageShape", "decode_patches", "silence_pillow_warnings", "undecodable", "write_patches"]
