"""What is wrong with the header of an image, a clip or a video."""


class HeaderError(ValueError):
    """A file whose header cannot be used."""

    def __init__(self, kind: str, detail: str) -> None:
        """Name what is wrong.

        Args:
            kind: `unreadable_header`, or that it is too large.
            detail: what was found, and the limit.
        """
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail
