"""What of a rendering is learned: the answers of assistants, each with the token that ends its turn."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from dataserver.assembly.chat.spans import Sources
from dataserver.dataset import TokenizingError

_NEVER: Final = re.compile(r"(?!)")


class Answer(NamedTuple):
    """Characters of a rendering, from `start` to before `end`."""

    start: int
    end: int


def find_answers(
    sources: Sources, messages: Sequence[Mapping[str, Any]], special: re.Pattern[str] | None, prompt: str
) -> list[Answer]:
    """Return the answers in a rendering, in their order.

    An answer is the text of an assistant's message; that of one with tool calls is all behind the prompt. To each
    belongs the special token behind it, with the white space between: so that a model learns to end its turn.

    Args:
        sources: which message each character came from.
        messages: of the conversation.
        special: finds special tokens.
        prompt: what the template writes before an answer, as `add_generation_prompt` adds it.

    Raises:
        TokenizingError: an answer cannot be told from what is around it.
    """
    special = special or _NEVER
    spans = {n: span for n in range(len(messages)) if (span := sources.span(n)) is not None}
    found: list[Answer] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number not in spans:
            if (message["content"] and not isinstance(message["content"], str)) or str(message["content"]).strip():
                raise TokenizingError(f"turn {number} holds tags or quotes alone, which are not found in a rendering")
            continue
        start, end = spans[number]
        limit = min((span[0] for n, span in spans.items() if n > number), default=len(sources.text))
        if end > limit:
            raise TokenizingError(f"the chat template writes turn {number} behind turn {number + 1}")
        if message.get("tool_calls"):
            start, end = _around_calls(
                sources.text, number, (found[-1].end if found else 0, start, end, limit), special, prompt
            )
        else:
            if "reasoning_content" in message:
                start = _behind_prompt(sources.text, found[-1].end if found else 0, start, prompt) or start
            start, end = _with_edges(sources.text, message, start, end)
            match = special.match(sources.text, _behind_spaces(sources.text, end))
            if match is not None and match.end() <= limit:
                end = match.end()
        found.append(Answer(start, end))
    return found


def _around_calls(
    text: str, number: int, bounds: tuple[int, int, int, int], special: re.Pattern[str], prompt: str
) -> tuple[int, int]:
    """The span of a message with tool calls, whose syntax the template writes."""
    before, start, end, limit = bounds
    begin = _behind_prompt(text, before, start, prompt)
    if begin is None:
        raise TokenizingError(
            f"the chat template writes no prompt before the tool calls of turn {number}, so that it is not known where "
            "they begin; leave such conversations out, or use a template with add_generation_prompt"
        )
    match = special.search(text, end, limit)
    if match is None:
        raise TokenizingError(f"the chat template writes no special token behind the tool calls of turn {number}")
    return begin, match.end()


def _behind_prompt(text: str, before: int, start: int, prompt: str) -> int | None:
    """Where the last prompt between two characters ends; None where there is none."""
    at = text.rfind(prompt, before, start) if prompt.strip() else -1
    return None if at < 0 else at + len(prompt)


def _with_edges(text: str, message: Mapping[str, Any], start: int, end: int) -> tuple[int, int]:
    """A span with the quotes and tags at the ends of a message, which no disguise has; without white space there."""
    content = message["content"]
    at = content.find(text[start:end]) if isinstance(content, str) else -1
    if at < 0:
        return start, end
    after = at + end - start
    while at and start and content[at - 1] == text[start - 1]:
        at, start = at - 1, start - 1
    while after < len(content) and end < len(text) and content[after] == text[end]:
        after, end = after + 1, end + 1
    found = text[start:end]
    return end - len(found.lstrip()), start + len(found.rstrip())


def _behind_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
