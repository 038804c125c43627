"""Where the texts of messages are in a rendering: found by rendering the conversation a second time, disguised.

In the disguise every character of a text is one sign of that text, a private-use character that nothing else has;
white space, quotes and tags stay, since templates look at them. Where the disguised rendering has the same length as
the true one, and is equal to it between the signs, a sign says which text a character came from, whatever the
template trimmed, moved or left out. Neither marks in templates nor renderings of a conversation's beginning are needed:
released templates have none of the former, and do not render a beginning as they render it within the whole.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserver.dataset import TokenizingError

CONTENT: Final = "content"
CALL: Final = "call"
"""Beginning of the part that a text of a tool call belongs to."""
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
    message: npt.NDArray[np.int32]
    """int32 [characters]: number of the message, -1 for what the template wrote, and for what a disguise leaves."""

    num_signs: npt.NDArray[np.int64]
    """int64 [texts]: characters of each text of `Disguise.texts`."""

    def spans(self) -> dict[int, tuple[int, int]]:
        """First and last + 1 of the characters of each message, by its number, where it has any."""
        at = np.flatnonzero(self.message >= 0)
        of = self.message[at]
        _, last = np.unique(of[::-1], return_index=True)
        numbers, first = np.unique(of, return_index=True)
        ends = at[::-1][last] + 1
        return dict(zip(numbers.tolist(), zip(at[first].tolist(), ends.tolist(), strict=True), strict=True))


class Text(NamedTuple):
    """A text of a message."""

    message: int
    part: str
    """`content`, `reasoning_content`, or `call` with its number."""
    num_signs: int
    """How many characters are disguised."""


class Disguise:
    """A sign for each text of a conversation."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tags: re.Pattern[str] | None, others: str) -> None:
        """Choose signs.

        Args:
            messages: of the conversation.
            tags: words that stay; those that the template has in itself.
            others: what else a rendering may have: no character of it becomes a sign.

        Raises:
            TokenizingError: there are more texts than signs.
        """
        self._tags: Final = [_PLAIN, *([tags] if tags else [])]
        self.texts: Final[list[Text]] = []
        """All texts, in order."""
        used = {c for c in json.dumps(messages, ensure_ascii=False) + others if ord(c) >= _SIGNS.start}
        self._free: Final = (chr(code) for code in _SIGNS if chr(code) not in used)
        self._signs: Final[list[str]] = []
        self.messages: Final = [
            mapped_texts(message, lambda text, part, n=number: self._disguised(text, part, n))  # type: ignore[misc]
            for number, message in enumerate(messages)
        ]
        """The conversation in its disguise."""

    def _disguised(self, text: str, part: str, number: int) -> str:
        """A text of a message, in its disguise."""
        if not (sign := next(self._free, "")):
            raise TokenizingError(f"it has more than {len(self._signs)} texts, contents and arguments; split it")
        stays = bytearray(len(text))
        for pattern in self._tags:
            for match in pattern.finditer(text):
                stays[match.start() : match.end()] = b"\1" * (match.end() - match.start())
        self._signs.append(sign)
        self.texts.append(Text(number, part, len(text) - sum(stays)))
        return "".join(c if stay else sign for c, stay in zip(text, stays, strict=True))

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
        number = np.array([signs.get(code, -1) for code in codes[at].tolist()], np.int64)
        of = np.array([one.message for one in self.texts], np.int32)
        message[at[number >= 0]] = of[number[number >= 0]]
        same = np.frombuffer(text.encode("utf-32-le"), np.uint32) == codes
        if not same[message < 0].all():
            raise TokenizingError(_CHANGES)
        return Sources(text, message, np.bincount(number[number >= 0], minlength=len(self.texts)))


_CHANGES: Final = (
    "the chat template changes texts by what they say, so that answers cannot be found in what it renders; use a "
    "template that prints them as they are"
)


def mapped_texts(message: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """A message with its texts changed: content, reasoning, and the names and arguments of tool calls.

    Args:
        message: the message.
        change: called with a text and with what it is a part of, as `Text.part` says it.
    """
    changed = dict(message)
    content = message["content"]
    if isinstance(content, str):
        changed["content"] = change(content, CONTENT)
    else:
        changed["content"] = [{**p, "text": change(p["text"], CONTENT)} if p["type"] == "text" else p for p in content]
    if "reasoning_content" in message:
        changed["reasoning_content"] = change(message["reasoning_content"], "reasoning_content")
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "function": _mapped(call["function"], partial(_of_part, change, f"{CALL} {number}"))}
            for number, call in enumerate(message["tool_calls"])
        ]
    return changed


def _of_part(change: Callable[[str, str], str], part: str, text: str) -> str:
    return change(text, part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The texts of nested values, changed; names of entries stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(part, change) for part in value]
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return value
