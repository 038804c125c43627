"""What is wrong with an image."""


class InvalidImageError(Exception):
    """These bytes are not a usable image; never leaves this folder."""


class ImageHeaderError(ValueError):
    """An image whose header cannot be used."""

    def __init__(self, kind: str, detail: str) -> None:
        """Name what is wrong.

        Args:
            kind: `unreadable_header` or `image_too_large`.
            detail: what was found, and the limit.
        """
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
