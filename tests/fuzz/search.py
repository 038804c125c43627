"""The search for inputs that fail: Hypothesis draws them, and makes one that it finds small; it is kept as a test."""

import hashlib
import time
import unittest
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, SupportsBytes, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

CORPUS: Final = Path(__file__).parent / "corpus"
"""Kept inputs, a folder for each target. What a run finds is put there, to be committed with the repair."""

ROUND: Final = settings(
    max_examples=10_000,  # it remembers them, so as to try none twice
    database=None,  # what is found is kept in the corpus, and a seed tries the same whatever ran before
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)

Input = TypeVar("Input", bound=SupportsBytes)


def recorded(target: str) -> list[Path]:
    """The kept inputs of a target, in order."""
    return sorted((CORPUS / target).glob("*"))


@dataclass(frozen=True, slots=True)
class Search:
    """How long to try inputs, and which."""

    seconds: float
    seed: int
    blob: str = ""
    """Of an input that a search found; only that is tried then."""
    corpus: Path = CORPUS

    def run(self, target: str, inputs: SearchStrategy[Input], attempt: Callable[[Input], None]) -> int:
        """Try inputs until the time is over, the same ones for a seed. Returns how many.

        Args:
            target: folder of the corpus where the smallest input that fails is kept.
            inputs: what to try.
            attempt: tries one; raises where it fails.

        Raises:
            Exception: the attempt's, at that input. Notes say what it is made of, and how to try it again.
        """
        end, tried = time.monotonic() + self.seconds, 0
        found: Path | None = None

        def test(tried_input: Input) -> None:
            nonlocal tried, found
            if tried and found is None and not self.blob and time.monotonic() > end:
                raise unittest.SkipTest  # ends the round
            tried += 1
            try:
                attempt(tried_input)
            except Exception as error:
                if found is not None:  # a larger one
                    found.unlink(missing_ok=True)
                found = self.keep(target, bytes(tried_input))
                error.add_note(f"kept as {found}")
                raise

        one_round = ROUND(given(inputs)(test))
        if self.blob:
            hypothesis.reproduce_failure(hypothesis.__version__, self.blob.encode())(one_round)()
        with suppress(unittest.SkipTest):
            for number in count():
                hypothesis.seed(f"{self.seed}.{number}")(one_round)()
        return tried

    def keep(self, target: str, data: bytes) -> Path:
        """Put an input into the corpus of a target; its file."""
        path = self.corpus / target / hashlib.sha256(data).hexdigest()[:16]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path
