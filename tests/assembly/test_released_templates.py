"""Released chat templates: ids are those of transformers, and learned is what trl marks in variants of them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.chats import RELEASED_TEMPLATES, as_asked, draw_conversation, image_count
from builders.released_chats import COPIED, RELEASED, write_released
from transformers import PreTrainedTokenizerFast

from dataserver.assembly import ChatTokenizer, load_tokenizer, open_chat
from dataserver.assembly.chat.renderer import NOW
from dataserver.dataset import EncodedChat
from dataserver.dataset.shards.chat import read_conversation

THOUGHTS = {"<think>", "</think>"}
BESIDES = {"phi3": {"<|endoftext|>"}, "phi3_5": {"<|endoftext|>"}, "qwen3": THOUGHTS}
"""Words that trl marks and that are no part of an answer: behind the last turn, and thoughts that nobody had."""


class Judged:
    """A folder with a template, and what transformers makes of it."""

    def __init__(self, folder: Path) -> None:
        self.theirs: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.chat: ChatTokenizer = open_chat(load_tokenizer("t", folder))

    def encoded(self, name: str, drawn: dict[str, Any], **options: Any) -> tuple[EncodedChat, dict[str, Any]]:
        """A conversation by us and by transformers: the same ids."""
        messages, tools = drawn["messages"], drawn["tools"]
        found = self.chat.encode_chat(read_conversation({"tools": tools}, messages, image_count(messages)).to_json())
        date, asked = NOW.strftime("%d %b %Y"), as_asked(RELEASED[name], messages)
        expected = self.theirs.apply_chat_template(asked, tools=tools or None, date_string=date, **options)
        assert found.ids.tolist() == expected["input_ids"], messages
        assert int(found.images.sum()) == image_count(messages)
        return found, expected


def compare(folder: Path, name: str, templates: Path, number: int) -> int:
    """How many conversations are the same with trl's marks as without, so that these prove what is learned of them."""
    written = write_released(folder, name, templates)
    plain, rng, proven = Judged(written.plain), random.Random(name), 0
    marked = Judged(written.marked) if written.marked else None
    for _ in range(number):
        drawn = draw_conversation(RELEASED[name], rng)
        found, _ = plain.encoded(name, drawn)
        if marked is None:
            continue
        with_marks, expected = marked.encoded(name, drawn, return_assistant_tokens_mask=True)
        is_marked = np.array(expected["assistant_masks"], np.bool_)
        assert not (with_marks.targets & ~is_marked).any(), drawn
        rest = with_marks.ids[is_marked & ~with_marks.targets].tolist()
        said = {marked.theirs.decode([id_], skip_special_tokens=False).strip() for id_ in rest}
        assert said - {""} <= BESIDES.get(name, set()), drawn
        if found.ids.tolist() == with_marks.ids.tolist():
            assert found.targets.tolist() == with_marks.targets.tolist(), drawn
            proven += 1
    for judged in (plain, marked):
        if judged is not None:
            judged.chat.close()
    return proven


def expected_of(name: str, number: int) -> range:
    """How many conversations the marks prove; what trl trains with has empty thoughts where Qwen3 leaves them out, and
    there is none of it for Llama 3.1 and 3.2."""
    if name == "qwen3":
        return range(1, number)
    return range(1) if name in ("llama3_1", "llama3_2") else range(number, number + 1)


@pytest.mark.parametrize("name", COPIED)
def test_released_templates_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert compare(tmp_path, name, RELEASED_TEMPLATES, 50) in expected_of(name, 50)


@pytest.fixture
def installed(python_with: Callable[[str], Path]) -> Path:
    """The templates of an installed trl."""
    (found,) = python_with("trl").parents[1].glob("lib/python*/site-packages/trl/chat_templates")
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", RELEASED)
def test_all_released_templates_are_those_of_transformers(name: str, installed: Path, tmp_path: Path) -> None:
    assert compare(tmp_path, name, installed, 500) in expected_of(name, 500)


@pytest.mark.long
def test_copies_are_those_of_trl(installed: Path) -> None:
    copies = sorted(RELEASED_TEMPLATES.glob("*.jinja"))
    assert {copy.stem.removesuffix("_training") for copy in copies} == set(COPIED)
    for copy in copies:
        assert copy.read_bytes() == (installed / copy.name).read_bytes()
