"""Inputs made from known ones: bits flipped, bytes cut, repeated, spliced with another input, put to extremes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
"""Kept inputs, a folder for each target. What a run finds is put there, to be committed with the repair."""

EXTREMES: Final = (
    b"\x00",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    b"\xff" * 8,
    b"\x80" * 10,
    b"'",
    b"\\",
    b"\n",
)
MAX_MUTATIONS: Final = 6
MAX_BYTES: Final = 1 << 20
"""Of a mutated input: repetitions of repetitions would fill memory."""


@dataclass(frozen=True, slots=True)
class Fuzzing:
    """How long to try inputs, and which."""

    seconds: float
    seed: int

    def numbers(self) -> Iterator[Random]:
        """A source of random numbers for each input, until the time is over; the same ones for a seed."""
        end, i = time.monotonic() + self.seconds, 0
        while time.monotonic() < end:
            yield Random(f"{self.seed}:{i}")  # a text: the same words in every process
            i += 1


def kept(target: str) -> list[Path]:
    """The kept inputs of a target, in order."""
    return sorted(path for path in (CORPUS / target).glob("*") if path.is_file())


def keep(target: str, name: str, data: bytes) -> Path:
    """Keep an input that was found to fail, so that it runs as an ordinary test from now on."""
    path = CORPUS / target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def mutated(data: bytes, others: Sequence[bytes], numbers: Random) -> bytes:
    """A few mutations of an input, one after the other.

    Args:
        data: the input.
        others: inputs to splice with; not empty.
        numbers: decides everything.
    """
    for _ in range(numbers.randint(1, MAX_MUTATIONS)):
        data = _mutated_once(data, others, numbers)[:MAX_BYTES]
    return data


def _mutated_once(data: bytes, others: Sequence[bytes], numbers: Random) -> bytes:
    start, end = sorted((numbers.randint(0, len(data)), numbers.randint(0, len(data))))
    match numbers.randrange(7):
        case 0 if data:
            i = numbers.randrange(len(data))
            return data[:i] + bytes([data[i] ^ 1 << numbers.randrange(8)]) + data[i + 1 :]
        case 1:
            return data[:start] + data[end:]
        case 2:
            return data[:end] + data[start:end] * numbers.choice((1, 2, 100)) + data[end:]
        case 3:
            extreme = numbers.choice(EXTREMES)
            return data[:start] + extreme + data[start + len(extreme) :]
        case 4:
            other = numbers.choice(others)
            return data[:start] + other[numbers.randint(0, len(other)) :]
        case 5:
            return data[:start] + numbers.randbytes(end - start) + data[end:]
        case _:
            return data[:start] + numbers.randbytes(numbers.randint(1, 8)) + data[start:]
