"""What processors of transformers (5.24) write around the token that stands for an image, before texts become ids."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from dataserver.assembly.chat.spans import Sources
from dataserver.planning.job.fields import Timestamps

_FAKE: Final = "<fake_token_around_image>"
_GLOBAL: Final = "<global-img>"
_IDEFICS3: Final = ("Idefics3Processor", "SmolVLMProcessor")
_WITH_TIMESTAMPS: Final = "Qwen3VLProcessor"
"""The processor that writes the time of each group of frames."""
_KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "audio": ("Qwen2AudioProcessor",),
    "video": ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", _WITH_TIMESTAMPS),
}
"""Processors that repeat the token for a clip or a video as often as it has embeddings here, and write nothing else but
timestamps."""
_TRIED: Final = range(0, 36_000, 37)
"""Tenths of a second that are written as a whole and in pieces."""


class Expansion(NamedTuple):
    """What becomes of the word that a template writes for an image."""

    processor: str
    """Class name of the processor."""
    placeholder: str
    """The word that the chat template writes for it."""
    before: str
    image: str
    """What stands for an embedding; it is written once here, and repeated when sequences are assembled."""
    after: str

    @property
    def words(self) -> set[str]:
        """Those that it writes and that texts of users may not be."""
        return {self.placeholder, self.image, self.before.strip(), self.after.strip()} - {""}

    def expanded(self, sources: Sources) -> Sources:
        """A rendering with all placeholders expanded; what is written there belongs to no message."""
        text = self.before + self.image + self.after
        parts: list[str] = []
        messages = []
        end = 0
        for match in re.finditer(re.escape(self.placeholder), sources.text):
            parts += [sources.text[end : match.start()], text]
            messages += [sources.message[end : match.start()], np.full(len(text), -1, np.int32)]
            end = match.end()
        parts.append(sources.text[end:])
        messages.append(sources.message[end:])
        return replace(sources, text="".join(parts), message=np.concatenate(messages))

    def marks(self, encode: Callable[[str], list[int]], rows: int, columns: int) -> dict[str, Any] | None:
        """What a job states as `sizing.marks`; None where nothing stands before or between embeddings.

        Args:
            encode: makes ids of what stands between two special tokens.
            rows, columns: of tiles, at most; 0 where images are not cut.
        """
        if self.processor not in _IDEFICS3:
            return None
        whole = encode(_FAKE + _GLOBAL)
        if not rows * columns:
            return {"alone": whole}
        tiles = [[encode(f"{_FAKE}<row_{r + 1}_col_{c + 1}>") for c in range(columns)] for r in range(rows)]
        return {"alone": whole, "tiles": tiles, "row_end": encode("\n"), "whole": [*encode("\n\n"), *whole]}


def known_processors(processor: str, kind: str) -> tuple[str, ...]:
    """Processors whose clips or videos become the same ids here, where a processor is none of these; else nothing.

    Args:
        processor: its class; empty where a folder names none, whose template's token is repeated.
        kind: `image`, `audio` or `video`.
    """
    known = _KNOWN.get(kind, ())
    return () if not processor or processor.removesuffix("Fast") in known else known


def timestamps_of(
    processor: str, tokens: Mapping[str, str], encode: Callable[[str], list[int]]
) -> dict[str, Any] | None:
    """What a job states as `sizing.video.timestamps` for a processor; None for one that writes none.

    Args:
        processor: its class.
        tokens: special tokens of its tokenizer by name.
        encode: makes ids of a text with special tokens.

    Raises:
        ValueError: the tokenizer has tokens for several digits of a time.
    """
    if processor.removesuffix("Fast") != _WITH_TIMESTAMPS:
        return None
    first = tokens.get("vision_start_token", "<|vision_start|>")
    last = tokens.get("vision_end_token", "<|vision_end|>")
    found = {
        "before": encode("<"),
        "digits": [id_ for digit in "0123456789" for id_ in encode(digit)],
        "point": encode("."),
        "after": encode(f" seconds>{first}"),
        "end": encode(last),
    }
    timestamps = Timestamps.model_validate(found) if len(found["digits"]) == len("0123456789") else None
    for tenths in _TRIED:
        text = f"{last}<{tenths // 10}.{tenths % 10} seconds>{first}"
        if timestamps is None or encode(text) != [*timestamps.end, *timestamps.ids_of(tenths)]:
            raise ValueError(
                f"{processor} writes {text}, and its tokenizer does not make an id of each digit; serve videos in "
                "documents, or take the tokenizer of a Qwen model"
            )
    return found


def expansion_of(processor: str, tokens: Mapping[str, str]) -> Expansion | None:
    """What a processor writes around the token for an image; None where it writes nothing.

    Args:
        processor: its class, without which nothing is known.
        tokens: special tokens of its tokenizer by name, as `boi_token`.
    """
    processor = processor.removesuffix("Fast")
    if processor == "Gemma3Processor":
        first, last = tokens.get("boi_token", "<start_of_image>"), tokens.get("eoi_token", "<end_of_image>")
        image = tokens.get("image_token", "<image_soft_token>")
        return Expansion(processor, first, f"\n\n{first}", image, f"{last}\n\n")
    if processor == "InternVLProcessor":
        image = tokens.get("context_image_token", "<IMG_CONTEXT>")
        around = tokens.get("start_image_token", "<img>"), tokens.get("end_image_token", "</img>")
        return Expansion(processor, image, around[0], image, around[1])
    if processor in _IDEFICS3:
        image = tokens.get("image_token", "<image>")
        return Expansion(processor, image, "", image, _FAKE)
    return None
