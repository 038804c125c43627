"""Images of a run that could not be decoded, and how many of them end it."""

from typing import Final

from trainclient.training.errors import TrainingError

FEWEST_IMAGES: Final = 1000
"""A share of invalid images is judged as if of at least this many, or one early bad image would end a run."""


class InvalidImages:
    """Counts the images of a run, and those of them that are invalid; the same in all processes."""

    def __init__(self, max_ratio: float) -> None:
        """Allow such a share of invalid images."""
        self.images = 0
        self.invalid = 0
        self._max_ratio = max_ratio

    def add(self, step: int, images: int, invalid: int) -> None:
        """Count the images of a step; TrainingError if too many of the run's are invalid."""
        self.images += images
        self.invalid += invalid
        if self.invalid > self._max_ratio * max(self.images, FEWEST_IMAGES):
            raise TrainingError(
                f"{self.invalid} of {self.images} images up to step {step} could not be decoded, more than "
                f"max_invalid_ratio {self._max_ratio:g} allows; run `dataserver lint PATH --decode` and leave them out "
                "with its quarantine list, or raise the limit"
            )
