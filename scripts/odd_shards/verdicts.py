"""What a manifest says of samples, in the words of docs/datasets.md. Nothing here asks the code that it judges."""

from dataclasses import dataclass

SERVED = "served"
INVALID = "invalid"
LEFT_OUT = "left out"

PAIR = "pair"
TEXT = "text"
DOCUMENT = "document"

CAPTION = b"an odd sample"

Members = tuple[tuple[str, bytes], ...]
"""Extension and content of each, in tar order."""


@dataclass(frozen=True)
class Odd:
    """The members of one sample, and what must become of it."""

    members: Members
    verdict: str
    kinds: tuple[str, ...] = ()
    """What lint must say of its key."""
    form: str = PAIR
    """What is served, if it is."""
    truncated: bool = False
    """Whether it is invalid because its data end too early: with `--truncated-images accept` it is served."""

    @classmethod
    def pair(cls, image: bytes, verdict: str, *kinds: str, extension: str = "jpg") -> "Odd":
        """An image, whatever it is, with a caption."""
        return cls(((extension, image), ("txt", CAPTION)), verdict, kinds)
