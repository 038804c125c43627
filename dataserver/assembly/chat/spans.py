"""Where the texts of messages are in a rendering: found by rendering the conversation a second time, disguised.

In the disguise every character of a message is one sign of that message, a private-use character that no text has;
white space, quotes and tags stay, since templates look at them. Where the disguised rendering has the same length as
the true one, and is equal to it between the signs, a sign says which message a character came from, whatever the
template trimmed, moved or left out. Neither marks in templates nor renderings of a conversation's beginning are needed:
released templates have none of the former, and do not render a beginning as they render it within the whole.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dataserver.dataset import TokenizingError

_SIGNS: Final = range(0xF0000, 0xFFFFE)
"""Private-use characters of one plane."""
TAG: Final = re.compile(r"</?\|?[\w.:/-]{1,40}\|?>|\[/?[A-Z_]{1,30}\]")
"""What a template may look for in a text: `</think>`, `<tool_call>`, `[/INST]`."""
_PLAIN: Final = re.compile(r"[\s\"\\\x00-\x1f]+")
"""Stays in a disguise: what templates trim or split at, and what JSON writes otherwise."""


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """Which message each character of a rendering came from."""

    text: str
    """The rendering."""
    message: npt.NDArray[np.int32]
    """int32 [characters]: number of the message, -1 for what the template wrote, and for what a disguise leaves."""

    def span(self, number: int) -> tuple[int, int] | None:
        """First and last + 1 of the characters of a message; None where there are none."""
        found = np.flatnonzero(self.message == number)
        return (int(found[0]), int(found[-1]) + 1) if len(found) else None


class Disguise:
    """A sign for each message of a conversation."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tags: re.Pattern[str] | None) -> None:
        """Choose signs.

        Args:
            messages: of the conversation.
            tags: words that stay; those that the template has in itself.
        """
        used = {c for message in messages for text in texts_of(message) for c in text if ord(c) >= _SIGNS.start}
        free = (chr(code) for code in _SIGNS if chr(code) not in used)
        self._signs: Final = [next(free) for _ in messages]
        self._tags: Final = [_PLAIN, *([tags] if tags else [])]
        self.messages: Final = [
            mapped_texts(message, lambda text, n=number: self.of(text, n))  # type: ignore[misc]
            for number, message in enumerate(messages)
        ]
        """The conversation in its disguise."""

    def of(self, text: str, number: int) -> str:
        """A text of a message, in its disguise."""
        found, stays = [self._signs[number]] * len(text), bytearray(len(text))
        for pattern in self._tags:
            for match in pattern.finditer(text):
                stays[match.start() : match.end()] = b"\1" * (match.end() - match.start())
        return "".join(c if stay else sign for c, stay, sign in zip(text, stays, found, strict=True))

    def sources(self, text: str, disguised: str) -> Sources:
        """Compare two renderings, of the conversation and of its disguise.

        Raises:
            TokenizingError: the template makes something else of the disguise.
        """
        if len(text) != len(disguised):
            raise TokenizingError(_CHANGES)
        codes = np.frombuffer(disguised.encode("utf-32-le"), np.uint32)
        signs = {ord(sign): number for number, sign in enumerate(self._signs)}
        message = np.full(len(text), -1, np.int32)
        at = np.flatnonzero((codes >= _SIGNS.start) & (codes < _SIGNS.stop))
        message[at] = [signs.get(code, -1) for code in codes[at].tolist()]
        same = np.frombuffer(text.encode("utf-32-le"), np.uint32) == codes
        if not same[message < 0].all():
            raise TokenizingError(_CHANGES)
        return Sources(text, message)

    def has_signs(self, number: int) -> bool:
        """Whether any character of a message is disguised."""
        return any(self._signs[number] in text for text in texts_of(self.messages[number]))


_CHANGES: Final = (
    "the chat template changes texts by what they say, so that answers cannot be found in what it renders; use a "
    "template that prints them as they are"
)


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message that `mapped_texts` maps."""
    found: list[str] = []
    mapped_texts(message, lambda text: found.append(text) or text)  # type: ignore[func-returns-value]
    yield from found


def mapped_texts(message: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A message with its texts changed: content, reasoning, and the names and arguments of tool calls."""
    changed = dict(message)
    content = message["content"]
    if isinstance(content, str):
        changed["content"] = change(content)
    else:
        changed["content"] = [{**p, "text": change(p["text"])} if p["type"] == "text" else p for p in content]
    if "reasoning_content" in message:
        changed["reasoning_content"] = change(message["reasoning_content"])
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "function": _mapped(call["function"], change)} for call in message["tool_calls"]
        ]
    return changed


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The texts of nested values, changed; names of entries stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(part, change) for part in value]
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return value
