"""Encoded images to patches: one function, bytes in, patches out."""

from dataserver.preprocessing.codecs.decoding import ImageShape, decode_patches, undecodable
from dataserver.preprocessing.codecs.patches import U8, write_patches
from dataserver.preprocessing.codecs.with_pillow import silence_pillow_warnings

__all__ = ["U8", "ImageShape", "decode_patches", "silence_pillow_warnings", "undecodable", "write_patches"]
