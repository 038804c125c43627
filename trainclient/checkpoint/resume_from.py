"""Where a run continues from; needs no torch."""

from enum import StrEnum


class ResumeFrom(StrEnum):
    """Where to continue from, if not from the checkpoint of a given step."""

    NEWEST = "newest"
    """The newest checkpoint; one that is damaged ends the run."""
    NEWEST_WHOLE = "newest-whole"
    """The newest checkpoint that is whole; what is passed over is named."""
    NONE = "none"
    """Begin anew; a folder that has checkpoints is refused."""
