"""What is wrong with an image."""

from dataserver.header_error import HeaderError


class InvalidImageError(Exception):
    """These bytes are not a usable image; never leaves this folder."""


class ImageHeaderError(HeaderError):
    """An image whose header cannot be used: `unreadable_header` or `image_too_large`."""
