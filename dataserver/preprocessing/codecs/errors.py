"""What codecs raise among themselves."""


class InvalidImageError(Exception):
    """These bytes are not a usable image; never leaves this package."""
