"""Token ids of conversations: those of transformers' `apply_chat_template`, but for words that users spell."""

import json
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dataserver.assembly.chat.answers import Answer, Marks, find_answers, needs_prompt
from dataserver.assembly.chat.expansion import timestamps_of
from dataserver.assembly.chat.placeholders import Placeholders
from dataserver.assembly.chat.rendering import Renderer
from dataserver.assembly.chat.spans import CALL, CONTENT, TAG, Disguise, Sources, Text, mapped_texts
from dataserver.assembly.chat.template import ChatTemplate, read_template
from dataserver.assembly.hugging_face import HuggingFaceTokenizer, TokenizerError, as_tokenizing_error
from dataserver.assembly.tokens import Tokenizer
from dataserver.dataset import (
    CHAT_LEFT_OUT,
    CHAT_NOT_ENDED,
    Conversation,
    EncodedChat,
    TokenizingEndedError,
    TokenizingError,
)
from dataserver.planning import I32

FEWEST_TOKENS: Final = 2
"""Tokens that a conversation has beside two for each of its images: plans count these around other samples."""
_Bools = npt.NDArray[np.bool_]


class _Encoded(NamedTuple):
    """The tokens of a rendering."""

    ids: I32
    """Token ids of the text, int32 [n]."""
    offsets: npt.NDArray[np.int64]
    """int64 [n, 2]: first and last + 1 of the characters of each."""


class _Rendering(NamedTuple):
    """What a template makes of a conversation."""

    sources: Sources
    prompt: str
    """Before an answer; empty where it was not asked for."""
    left_out: list[Text]
    """Texts that it does not print."""
    in_part: list[Text]
    """Texts that it prints a part of."""


class ChatTokenizer:
    """A tokenizer with its chat template."""

    def __init__(
        self, tokenizer: HuggingFaceTokenizer, template: ChatTemplate, renderer: Renderer, media: Collection[str] = ()
    ) -> None:
        """Prepare to encode; `open_chat` does so for a folder."""
        self._tokenizer, self._media = tokenizer, tuple(media)
        self._renderer = renderer
        self._template = template
        self._model = tokenizer.with_added_tokens()
        added = self._model.get_added_tokens_decoder()
        words = {id_: token for id_, token in added.items() if token.content.strip()}
        self._ids: Final = {token.content: id_ for id_, token in words.items()}
        self._any_word: Final = _finder([token.content for token in words.values()])
        self._placeholders: Final = Placeholders(template, self._ids)
        self._eos: Final = template.tokens.get("eos_token", "")
        special = {token.content for token in words.values() if token.special}
        ends = {self._eos} if self._eos.strip() else set[str]()  # not special in all files
        self._end_word: Final = _finder([*(special | ends)])
        special |= {*self._placeholders.of_images, *(ends & self._ids.keys())}
        if template.expansion is not None:
            special |= template.expansion.words & self._ids.keys()
        self._special_word: Final = _finder([*special])
        """Words that nobody's text may spell."""
        of_template = TAG.findall(template.text + template.text_for_tools)
        self._tag: Final = _finder([*of_template, *(word for word in self._ids if len(word) > 1)])
        self._is_word: Final = np.ones(tokenizer.vocab_size, np.bool_)
        self._is_word[list(tokenizer.from_text)] = False
        self._is_special: Final = np.zeros(tokenizer.vocab_size, np.bool_)
        self._is_special[[self._ids[word] for word in special]] = True
        self._of_template: Final = template.text + template.text_for_tools + json.dumps(template.tokens)
        self._newline: Final = self._model.encode("\n", add_special_tokens=False).ids

    @property
    def name(self) -> str:
        """Name of the tokenizer, by which jobs ask for it."""
        return self._tokenizer.name

    @property
    def digest(self) -> str:
        """Identifies the tokenizer in a job."""
        return self._tokenizer.digest

    @property
    def chat_digest(self) -> str:
        """Identifies the template in a job."""
        return self._template.digest(self._media)

    @property
    def vocab_size(self) -> int:
        """All ids lie below it."""
        return self._tokenizer.vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process it is opened again, once."""
        return _opened, (self.name, self._tokenizer.path, self.digest, self.chat_digest, self._media)

    def begin_batch(self) -> None:
        """Forget how many conversations the template took too long for."""
        self._renderer.begin_batch()

    def close(self) -> None:
        """End the process that renders."""
        self._renderer.close()

    def encode_chat(self, conversation: str) -> EncodedChat:
        """Return the ids of a conversation, given as its index holds it.

        Raises:
            TokenizingEndedError: the template takes too long for it.
            TokenizingError: the template refuses it, or what it renders cannot be used; says why.
            TokenizerError: the template is of no use for any conversation.
        """
        chat = Conversation.from_json(conversation)
        mark = _unused_character(conversation + self._of_template)
        messages = [self._escaped_message(message, mark) for message in chat.messages]
        tools = _escaped(chat.tools, self._any_word, mark)
        found = self._rendered(messages, tools, conversation)
        if self._template.expansion is not None:
            found = found._replace(sources=self._template.expansion.expanded(found.sources))
        encoded = self._encode(found.sources.text, mark)
        images = self._placeholders.found(encoded.ids, chat.media)
        self._check_words(encoded, found.sources, messages)
        answers = find_answers(found.sources, messages, Marks(self._end_word, self._eos, found.prompt))
        targets = _targets(encoded, answers)
        targets &= ~images
        targets[:1] = False  # nothing comes before it
        if not targets.any():
            raise TokenizingError("no token of an answer is left in what the chat template renders")
        if len(targets) - images.sum() < FEWEST_TOKENS + 2 * images.sum():
            raise TokenizingError(
                f"its {len(targets)} tokens are fewer than two and two more for each image, around which plans count "
                "as many; give the conversation more text, or use a template that writes tokens around images"
            )
        starts = np.maximum.accumulate(encoded.offsets[:, 0])
        ends = sorted({int(np.searchsorted(starts, answer.end)) for answer in answers} - {0})
        return EncodedChat(encoded.ids, targets, images, ends, _flaws(found, answers))

    def _escaped_message(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """A message in which no word is one of the template's. Assistants may use those that are not special: tags of
        thoughts and calls."""
        words = self._special_word if message["role"] == "assistant" else self._any_word
        escaped = mapped_texts(message, lambda text, _: str(_escaped(text, words, mark)))
        escaped |= {name: _escaped(message[name], words, mark) for name in ("name", "tool_call_id") if name in message}
        if "tool_calls" in message:  # with the names of arguments
            calls = message["tool_calls"]
            escaped["tool_calls"] = [{**_escaped(call, words, mark), "type": "function"} for call in calls]
        return escaped

    def _rendered(self, messages: list[dict[str, Any]], tools: list[Any], conversation: str) -> _Rendering:
        """What the template makes of a conversation. Where it drops contents it may want them as parts."""
        failure: TokenizingError | None = None
        fewest: _Rendering | None = None
        messages = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
        parts = [_as_parts(message) for message in messages]
        for form in (messages,) if parts == messages else (messages, parts):
            try:
                found = self._rendered_as(form, tools, conversation)
            except TokenizingEndedError:
                raise
            except TokenizingError as error:
                failure = failure or error
                continue
            if fewest is None or len(found.left_out) < len(fewest.left_out):
                fewest = found
            if not any(text.part == CONTENT for text in found.left_out):
                break
        if fewest is None:
            assert failure is not None
            raise failure
        return fewest

    def _rendered_as(self, messages: list[dict[str, Any]], tools: list[Any], conversation: str) -> _Rendering:
        """As `_rendered`. Raises TokenizingError where a turn or a call is left out."""
        disguise = Disguise(messages, self._tag, conversation + self._of_template)
        given = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": False}
        asked = [given, {**given, "messages": disguise.messages}]
        if needs_prompt(messages):
            asked.append({**given, "add_generation_prompt": True})
        text, disguised, *longer = self._renderer.render(asked)
        sources = disguise.sources(text, disguised)
        prompt = longer[0][len(text) :] if longer and longer[0].startswith(text) else ""
        counted = [(one, int(num)) for one, num in zip(disguise.texts, sources.num_signs, strict=True)]
        left_out = [one for one, num in counted if one.num_signs and not num]
        present = {one.message for one, num in counted if num}
        for one in left_out:
            role = messages[one.message]["role"]
            if one.message not in present:
                raise TokenizingError(
                    f"the chat template leaves out turn {one.message}, of the role {role}; use the template of a model "
                    "that knows such turns, or take them out"
                )
            if one.part.startswith(CALL):
                raise TokenizingError(
                    f"the chat template leaves out {one.part} of turn {one.message}, or an argument of it; use the "
                    "template of a model that makes such calls, or write one call a turn"
                )
        in_part = [one for one, num in counted if 0 < num < one.num_signs]
        return _Rendering(sources, prompt, left_out, in_part)

    def _encode(self, text: str, mark: str) -> _Encoded:
        """The tokens of a rendering; at its marks it is cut, and they are none of it."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        ends = [-1, *(match.start() for match in re.finditer(re.escape(mark), text)), len(text)]
        for before, end in pairwise(ends):
            begin = before + 1
            try:
                if before < 0:
                    encoding, skipped, shift = self._model.encode(text[begin:end], add_special_tokens=False), 0, 0
                else:  # behind a line break: some tokenizers begin every text with a space
                    encoding, skipped, shift = self._behind_newline(text[begin:end])
            except BaseException as error:  # a panic of the bindings is no Exception
                raise as_tokenizing_error(error) from error
            ids += encoding.ids[skipped:]
            offsets += [(a + begin - shift, b + begin - shift) for a, b in encoding.offsets[skipped:]]
        return _Encoded(np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2))

    def _behind_newline(self, piece: str) -> tuple[Any, int, int]:
        encoding = self._model.encode("\n" + piece, add_special_tokens=False)
        if encoding.ids[: len(self._newline)] == self._newline:
            return encoding, len(self._newline), 1
        return self._model.encode(piece, add_special_tokens=False), 0, 0

    def _check_words(self, encoded: _Encoded, sources: Sources, messages: Sequence[dict[str, Any]]) -> None:
        """Raise TokenizingError where a text became a reserved id all the same."""
        of_assistant = np.array([message["role"] == "assistant" for message in messages])
        author = np.where(sources.message < 0, 0, 1 + of_assistant[np.maximum(sources.message, 0)])
        for kind, reserved in ((1, self._is_word), (2, self._is_special)):
            before = np.concatenate([[0], np.cumsum(author == kind)])
            first, last = encoded.offsets.T
            touched = (before[last] > before[first]) & reserved[encoded.ids]
            if touched.any():
                at = encoded.offsets[np.flatnonzero(touched)[0]].tolist()
                raise TokenizingError(
                    f"its text {sources.text[at[0] : at[1]][:20]!a} alone is the reserved id {encoded.ids[touched][0]}"
                )


def _targets(encoded: _Encoded, answers: Sequence[Answer]) -> _Bools:
    """The tokens that have a character of an answer that is learned. bool [tokens]."""
    targets = np.zeros(len(encoded.ids), np.bool_)
    first, last = encoded.offsets.T
    for answer in answers:
        if answer.is_learned:
            targets |= (first < answer.end) & (last > answer.start)
    return targets


def _flaws(found: _Rendering, answers: Sequence[Answer]) -> list[tuple[str, str]]:
    """What may not be as it was meant, one finding of each kind."""
    flaws = []
    if texts := found.left_out + found.in_part:
        first = min(texts)
        flaws.append(
            (
                CHAT_LEFT_OUT,
                f"the chat template leaves out {len(texts)} texts or parts of them, the first in the {first.part} of "
                f"turn {first.message}",
            )
        )
    if num_open := sum(not answer.is_ended for answer in answers):
        flaws.append(
            (
                CHAT_NOT_ENDED,
                f"behind {num_open} of {len(answers)} answers the chat template writes neither a special token nor "
                "eos_token: a model does not learn to end them",
            )
        )
    return flaws


def image_marks(tokenizer: Tokenizer, rows: int, columns: int) -> dict[str, Any] | None:
    """Return what a job states as `sizing.marks` for the processor of a tokenizer's folder; None where it has none.

    Args:
        tokenizer: with files of a chat model.
        rows, columns: of tiles, at most; 0 where images are not cut.

    Raises:
        TokenizerError: a file of the folder cannot be used.
    """
    template = _template_of(tokenizer)
    if template is None or template.expansion is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    model = tokenizer.with_added_tokens()
    return template.expansion.marks(lambda text: model.encode(text, add_special_tokens=False).ids, rows, columns)


def video_timestamps(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return what a job states as `sizing.video.timestamps` for the processor of a tokenizer's folder; None where it
    writes none.

    Raises:
        TokenizerError: a file of the folder cannot be used.
    """
    template = _template_of(tokenizer)
    if template is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        return None
    model = tokenizer.with_added_tokens()
    try:
        return timestamps_of(
            template.processor, template.tokens, lambda text: model.encode(text, add_special_tokens=False).ids
        )
    except ValueError as error:
        raise TokenizerError(f"tokenizer {tokenizer.name}: {error}") from None


def open_chat(tokenizer: Tokenizer, media: Collection[str] = ()) -> ChatTokenizer:
    """Return a tokenizer with the chat template of its folder.

    Args:
        tokenizer: of the folder.
        media: what the dataset serves beside images, see `chat_digest`.

    Raises:
        TokenizerError: there is none, or it cannot be used.
    """
    template = _template_of(tokenizer)
    if template is None or not isinstance(tokenizer, HuggingFaceTokenizer):
        raise TokenizerError(
            f"tokenizer {tokenizer.name} has no chat template; give the folder of a chat model as "
            f"{tokenizer.name}=FOLDER, with tokenizer.json and chat_template.jinja, or chat_template in "
            "tokenizer_config.json"
        )
    return ChatTokenizer(tokenizer, template, Renderer(template, str(tokenizer.path.parent)), media)


@lru_cache(maxsize=4)
def _opened(name: str, path: Path, digest: str, chat_digest: str, media: tuple[str, ...]) -> ChatTokenizer:
    """The tokenizer of a file, with its template. Raises TokenizerError where a file has changed."""
    found = open_chat(HuggingFaceTokenizer(name, path), media)
    if (found.digest, found.chat_digest) != (digest, chat_digest):
        raise TokenizerError(f"files of {path.parent} changed while they were used; run the command again")
    return found


def chat_digest(tokenizer: Tokenizer, media: Collection[str] = ()) -> str:
    """Return what identifies the chat template of a tokenizer's folder in a job; empty where there is none.

    Args:
        tokenizer: of the folder.
        media: `audio`, `video`, as far as the dataset serves them (`Dataset.media`).

    Raises:
        TokenizerError: a file of the folder cannot be used.
    """
    template = _template_of(tokenizer)
    return "" if template is None else template.digest(media)


def _template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    return read_template(tokenizer.path.parent) if isinstance(tokenizer, HuggingFaceTokenizer) else None


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message if isinstance(content, list) else {**message, "content": [{"type": "text", "text": content}]}


def _finder(words: Sequence[str]) -> re.Pattern[str] | None:
    """Finds words, the longest that fit; None without any."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True)))) if words else None


def _unused_character(conversation: str) -> str:
    """A noncharacter that a conversation does not have. Raises TokenizingError if it has all."""
    free = (chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in conversation)
    if not (found := next(free, "")):
        raise TokenizingError("it has all 32 noncharacters from U+FDD0 on; take one of them out")
    return found


def _escaped(value: Any, words: re.Pattern[str] | None, mark: str) -> Any:
    """Texts with a mark behind the first character of each word, so that it is none."""
    if words is None:
        return value
    if isinstance(value, str):
        return words.sub(lambda match: match[0][:1] + mark + match[0][1:], value)
    if isinstance(value, list):
        return [_escaped(part, words, mark) for part in value]
    if isinstance(value, dict):
        return {_escaped(name, words, mark): _escaped(part, words, mark) for name, part in value.items()}
    return value
