"""What of a rendering is learned: the answers of assistants, each with the token that ends its turn."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

from dataserver.assembly.chat.spans import TAG, Sources
from dataserver.dataset import TokenizingError

_NEVER: Final = re.compile(r"(?!)")
_OPENING_CHARS: Final = 256
"""Characters before a text in which the token is looked for that opens its turn."""


class Answer(NamedTuple):
    """Characters of a rendering, from `start` to before `end`."""

    start: int
    end: int
    is_ended: bool
    """Whether the last ones are a token that ends the turn."""
    is_learned: bool = True
    """Whether it is a target; one of weight 0 is none."""


class Marks(NamedTuple):
    """What a template writes around texts."""

    special: re.Pattern[str] | None
    """Finds special tokens, and the one that ends a text; None where there is none."""
    eos: str
    """The token that ends a text; empty where the files name none."""
    prompt: str
    """What the template writes before an answer, as `add_generation_prompt` adds it; empty where it is not asked."""


class _Bounds(NamedTuple):
    """Where an answer is looked for."""

    before: int
    """End of the answer before it."""
    start: int
    end: int
    """First and last + 1 of the characters that are its own."""
    limit: int
    """First character of what later turns say."""


def needs_prompt(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an answer may begin before the first of its characters that a disguise shows."""
    return any(
        "tool_calls" in message or "reasoning_content" in message or _begins_plain(message)
        for message in messages
        if message["role"] == "assistant"
    )


def find_answers(sources: Sources, messages: Sequence[Mapping[str, Any]], marks: Marks) -> list[Answer]:
    """Return the answers in a rendering, in their order.

    An answer is the text of an assistant's message; that of one with tool calls is all behind the prompt. To each
    belongs the special token behind it, with the white space between: so that a model learns to end its turn.

    Args:
        sources: which message each character came from.
        messages: of the conversation; one with the weight 0 is not learned.
        marks: what stands around texts.

    Raises:
        TokenizingError: an answer cannot be told from what is around it.
    """
    special = marks.special or _NEVER
    spans = sources.spans()
    starts = [spans[n][0] if n in spans else len(sources.text) for n in range(len(messages))]
    limits = [*accumulate([len(sources.text), *starts[:0:-1]], min)][::-1]  # the first start of any later message
    has_calls = any("tool_calls" in message for message in messages)
    openers = _openers(sources.text, messages, spans, special, marks) if has_calls else set[str]()
    found: list[Answer] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number not in spans:
            if (message["content"] and not isinstance(message["content"], str)) or str(message["content"]).strip():
                raise TokenizingError(
                    f"turn {number} holds nothing but tags or quotes, which cannot be found in a rendering"
                )
            continue
        bounds = _Bounds(found[-1].end if found else 0, *spans[number], limits[number])
        if bounds.end > bounds.limit:
            raise TokenizingError(f"the chat template writes turn {number} behind turn {number + 1}")
        if message.get("tool_calls"):
            start, end = _around_calls(sources.text, number, bounds, special, marks, openers)
            is_ended = True
        else:
            start, end, is_ended = _around_text(sources, number, message, bounds, special, marks.prompt)
        of = sources.message[start:end]
        if (others := of[(of >= 0) & (of != number)]).size:
            raise TokenizingError(f"the chat template writes turn {others[0]} within turn {number}, an answer")
        found.append(Answer(start, end, is_ended, message.get("weight") != 0))
    return found


def _around_text(
    sources: Sources, number: int, message: Mapping[str, Any], bounds: _Bounds, special: re.Pattern[str], prompt: str
) -> tuple[int, int, bool]:
    """The span of a message without tool calls, and whether a token ends it."""
    text = sources.text
    start, end = _with_edges(sources, number, message, bounds.start, bounds.end)
    behind = _behind_prompt(text, bounds.before, bounds.start, prompt)
    if behind is not None and ("reasoning_content" in message or _is_own(text[behind:start], message)):
        start = behind
    match = special.match(text, _behind_spaces(text, end))
    if match is None or match.end() > bounds.limit:
        return start, end, False
    return start, match.end(), True


def _around_calls(
    text: str, number: int, bounds: _Bounds, special: re.Pattern[str], marks: Marks, openers: set[str]
) -> tuple[int, int]:
    """The span of a message with tool calls, whose syntax the template writes."""
    begin = _behind_prompt(text, bounds.before, bounds.start, marks.prompt)
    if begin is None:
        raise TokenizingError(
            f"the chat template writes no prompt before the tool calls of turn {number}, so that it is not known where "
            "they begin; use the template of a model that calls tools, which knows add_generation_prompt"
        )
    match = special.search(text, bounds.end, bounds.limit)
    if match is None:
        raise TokenizingError(
            f"the chat template writes no special token behind the tool calls of turn {number}, so that it is not "
            "known where they end; use the template of a model that calls tools"
        )
    while match[0] != marks.eos:  # those that follow each other, up to the one that opens another turn
        following = special.match(text, match.end(), bounds.limit)
        if following is None or following[0] in openers:
            break
        match = following
    rest = text[match.end() : bounds.limit].lstrip()
    if match[0] != marks.eos and rest and special.match(rest) is None:
        raise TokenizingError(
            f"the chat template writes {match[0]} within the tool calls of turn {number}, so that it is not known "
            "where they end; use a template that ends turns with the eos_token of its tokenizer_config.json"
        )
    return begin, match.end()


def _openers(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    spans: Mapping[int, tuple[int, int]],
    special: re.Pattern[str],
    marks: Marks,
) -> set[str]:
    """Special tokens that open turns: those of the prompt, and the last one before the text of anybody else."""
    found = {match[0] for match in special.finditer(marks.prompt)}
    for number, (start, _) in spans.items():
        if messages[number]["role"] != "assistant":
            before = [match[0] for match in special.finditer(text, max(0, start - _OPENING_CHARS), start)]
            found.update(before[-1:])
    return found - {marks.eos}


def _behind_prompt(text: str, before: int, start: int, prompt: str) -> int | None:
    """Where the last prompt between two characters ends; None where there is none."""
    at = text.rfind(prompt, before, start) if prompt.strip() else -1
    return None if at < 0 else at + len(prompt)


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _begins_plain(message: Mapping[str, Any]) -> bool:
    """Whether the first text of a message begins with what a disguise leaves: white space or a tag."""
    return any(text[:1].isspace() or TAG.match(text) is not None for text in _texts(message)[:1])


def _is_own(text: str, message: Mapping[str, Any]) -> bool:
    """Whether what lies between a prompt and an answer is the answer's own white space, and tags that it has."""
    if not _begins_plain(message):
        return False
    own = _texts(message)[0]
    return not TAG.sub("", text).strip() and all(tag in own for tag in TAG.findall(text))


def _with_edges(sources: Sources, number: int, message: Mapping[str, Any], start: int, end: int) -> tuple[int, int]:
    """A span with the quotes and tags at the ends of a message, which no disguise has; without white space there."""
    text, texts = sources.text, _texts(message)
    if not texts:
        return start, end
    first, last = texts[0], texts[-1]
    if len(texts) == 1 and (at := first.find(text[start:end])) >= 0:
        after = at + end - start
    else:  # by the first and the last of the runs that are its own
        mine = sources.message[start:end] == number
        head = text[start : start + int((~mine).argmax() if not mine.all() else len(mine))]
        tail = text[end - int((~mine[::-1]).argmax() if not mine.all() else len(mine)) : end]
        at, after = first.find(head), last.rfind(tail)
        after = len(last) if after < 0 else after + len(tail)
    while at > 0 and start and first[at - 1] == text[start - 1]:
        at, start = at - 1, start - 1
    while after < len(last) and end < len(text) and last[after] == text[end]:
        after, end = after + 1, end + 1
    found = text[start:end]
    return end - len(found.lstrip()), start + len(found.rstrip())


def _behind_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
