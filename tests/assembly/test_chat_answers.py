"""What is learned of a rendering, character by character, where templates write turns in other ways."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders.chats import image_count, write_chat_folder

from dataserver.assembly import ChatTokenizer, HuggingFaceTokenizer, TokenizerError, load_tokenizer, open_chat
from dataserver.assembly.chat.rendering import Renderer
from dataserver.assembly.chat.template import read_template
from dataserver.dataset import EncodedChat, TokenizingEndedError, TokenizingError
from dataserver.dataset.shards.chat import read_conversation

HI, HO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "CALL{% endfor %}END{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def opened(folder: Path, template: str, tags: tuple[str, ...] = (), **config: Any) -> ChatTokenizer:
    """A byte-level tokenizer with a template; some added tokens of it are not special."""
    write_chat_folder(folder, "qwen2-vl")
    model = json.loads((folder / "tokenizer.json").read_text())
    model["added_tokens"] = [{**t, "special": t["content"] not in tags} for t in model["added_tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(model))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **config}))
    return open_chat(load_tokenizer("t", folder))


def encoded(chat: ChatTokenizer, messages: list[dict[str, Any]]) -> EncodedChat:
    return chat.encode_chat(read_conversation({}, messages, image_count(messages)).to_json())


def learned(chat: ChatTokenizer, found: EncodedChat) -> list[str]:
    """The texts of the runs that are learned."""
    texts, before = list[str](), False
    model = chat._tokenizer.with_added_tokens()
    runs: list[list[int]] = []
    for id_, target in zip(found.ids.tolist(), found.targets.tolist(), strict=True):
        if target and not before:
            runs.append([])
        if target:
            runs[-1].append(id_)
        before = target
    texts = [model.decode(run, skip_special_tokens=False) for run in runs]
    chat.close()
    return texts


def calls(*arguments: dict[str, Any]) -> dict[str, Any]:
    made = [{"function": {"name": "look", "arguments": one}} for one in arguments]
    return {"role": "assistant", "content": "", "tool_calls": made}


def test_an_end_that_is_not_special_is_learned(tmp_path: Path) -> None:
    chat = opened(tmp_path, TURNS.replace("END", "<|im_end|>\n"), ("<|im_end|>",), eos_token="<|im_end|>")
    found = encoded(chat, [HI, HO, HI, {**HO, "content": "a <|im_end|> b"}])
    end = chat._ids["<|im_end|>"]
    assert not found.flaws
    assert found.ids.tolist().count(end) == 4, "an assistant does not spell it"
    assert learned(chat, found) == ["ho<|im_end|>", "a <|im_end|> b<|im_end|>"]


def test_answers_without_an_end_are_told(tmp_path: Path) -> None:
    chat = opened(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    found = encoded(chat, [HI, HO, HI, HO])
    ((kind, detail),) = found.flaws
    assert kind == "chat_not_ended"
    assert detail.startswith("behind 2 of 2 answers")
    assert learned(chat, found) == ["ho", "ho"]


@pytest.mark.parametrize("answer", [{"at": "x"}, {"at": "x", "n": 3}])
def test_all_tokens_that_end_calls_are_learned(tmp_path: Path, answer: dict[str, Any]) -> None:
    call = "<|vision_start|>{{ c.function.name }}{{ c.function.arguments | tojson }}<|vision_end|>"
    chat = opened(tmp_path, CALLS.replace("CALL", call).replace("END", "<|endoftext|>"))
    found = encoded(chat, [HI, calls({"at": "y"}, answer), HI, HO])
    one, two = (f"<|vision_start|>look{json.dumps(given)}<|vision_end|>" for given in ({"at": "y"}, answer))
    assert learned(chat, found) == [f"{one}{two}<|endoftext|>", "ho<|endoftext|>"], "and no <|im_start|>"


def test_a_token_that_opens_only_turns_of_others_ends_no_call(tmp_path: Path) -> None:
    """It follows the end of a call at once, and is in no prompt."""
    opening = "{{ '<|vision_start|>' if m.role == 'user' else '<|im_start|>' }}{{ m.role }}"
    template = CALLS.replace("<|im_start|>{{ m.role }}", opening)
    chat = opened(tmp_path, template.replace("CALL", "{{ c.function | tojson }}").replace("END", "<|im_end|>"))
    found = encoded(chat, [HI, calls({"at": "x"}), HI, HO])
    assert learned(chat, found) == ['{"name": "look", "arguments": {"at": "x"}}<|im_end|>', "ho<|im_end|>"]


def test_a_token_within_a_call_does_not_end_it(tmp_path: Path) -> None:
    call = "{{ c.function.name }}<|vision_end|>{{ c.function.arguments | tojson }}"
    chat = opened(tmp_path, CALLS.replace("CALL", call).replace("END", "<|im_end|>\n"))
    with pytest.raises(TokenizingError, match=r"writes <\|vision_end\|> within the tool calls of turn 1"):
        encoded(chat, [HI, calls({"n": 3})])
    chat.close()


def test_contents_of_parts_have_their_edges(tmp_path: Path) -> None:
    """Quotes and tags at the ends of an answer with an image; the prompt ends before the first of them."""
    parts = (
        "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    )
    content = "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    chat = opened(tmp_path, TURNS.replace("{{ m.content }}", content).replace("END", "<|im_end|>\n"))
    said = [{"type": "text", "text": '"see" '}, {"type": "image"}, {"type": "text", "text": 'it is "so"'}]
    found = encoded(chat, [HI, {**HO, "content": said}])
    assert learned(chat, found) == ['"see" ', 'it is "so"<|im_end|>'], "an image is no target"


@pytest.mark.parametrize("text", ["    x = 1", "<b>\n bold", "\tx"])
def test_an_answer_begins_behind_the_prompt(tmp_path: Path, text: str) -> None:
    chat = opened(tmp_path, TURNS.replace("END", "<|im_end|>\n"))
    assert learned(chat, encoded(chat, [HI, {**HO, "content": text}])) == [f"{text}<|im_end|>"]


def test_turns_of_weight_0_are_not_learned(tmp_path: Path) -> None:
    chat = opened(tmp_path, TURNS.replace("END", "<|im_end|>\n") + "{{ messages[0].weight is defined }}")
    found = encoded(chat, [HI, {**HO, "content": "no", "weight": 0}, HI, {**HO, "weight": 1}])
    assert len(found.ends) == 2
    assert learned(chat, found) == ["ho<|im_end|>"]


def test_texts_of_others_are_never_learned(tmp_path: Path) -> None:
    """A template that prints the answer before the question too, and a user who writes the sign of the answer."""
    chat = opened(tmp_path, "{{ messages[1].content }}" + TURNS.replace("END", "<|im_end|>\n"))
    with pytest.raises(TokenizingError, match="writes turn 0 within turn 1, an answer"):
        encoded(chat, [HI, HO])
    chat.close()
    tools = "{{ tools | tojson }}" + TURNS.replace("END", "<|im_end|>\n")
    chat = opened(tmp_path / "tools", tools)
    given = read_conversation({"tools": [{"name": "".join(map(chr, range(0xF0000, 0xF0010)))}]}, [HI, HO], 0)
    assert learned(chat, chat.encode_chat(given.to_json())) == ["ho<|im_end|>"]


def test_a_reserved_character_cannot_be_cut(tmp_path: Path) -> None:
    """Nobody but an assistant can spell it, and that only where it is not special, as with other tags."""
    write_chat_folder(tmp_path, "qwen2-vl")
    path = tmp_path / "tokenizer.json"
    model = json.loads(path.read_text())
    token = {**model["added_tokens"][0], "content": "$", "id": model["model"]["vocab"]["$"], "special": False}
    path.write_text(json.dumps({**model, "added_tokens": [*model["added_tokens"], token]}))
    chat = open_chat(load_tokenizer("t", tmp_path))
    answer = {**HO, "content": "5 $ each"}
    assert encoded(chat, [HI, answer]).targets.any()
    with pytest.raises(TokenizingError, match=r"its text '\$' alone is the reserved id"):
        encoded(chat, [{**HI, "content": "how many $ each?"}, answer])
    chat.close()


def test_images_are_those_of_the_conversation(tmp_path: Path) -> None:
    chat = opened(tmp_path, TURNS.replace("END", "<|im_end|>\n"), ("<|image_pad|>",))
    pad = chat._ids["<|image_pad|>"]
    found = encoded(chat, [HI, {**HO, "content": "a <|image_pad|>"}])
    assert pad not in found.ids.tolist()
    assert learned(chat, found) == ["a <|image_pad|><|im_end|>"]
    chat = opened(tmp_path / "always", "<|image_pad|>" + TURNS.replace("END", "<|im_end|>\n"))
    with pytest.raises(TokenizingError, match=r"writes <\|image_pad\|>, which stands for an image, and the conv"):
        encoded(chat, [HI, HO])
    chat.close()


def test_what_a_template_leaves_out_is_told(tmp_path: Path) -> None:
    write_chat_folder(tmp_path, "llama3")
    chat = open_chat(load_tokenizer("t", tmp_path))
    ((kind, detail),) = encoded(chat, [HI, {**calls({"at": "x"}), "content": "so"}]).flaws
    assert (kind, detail.partition(", ")[2]) == ("chat_left_out", "the first in the content of turn 1")
    with pytest.raises(TokenizingError, match="leaves out call 1 of turn 1, or an argument of it"):
        encoded(chat, [HI, calls({"at": "x"}, {"at": "y"})])
    chat.close()
    write_chat_folder(tmp_path / "qwen3", "qwen3")
    chat = open_chat(load_tokenizer("t", tmp_path / "qwen3"))
    thought = {**HO, "content": "<think>\nhm\n</think>\n\nho"}
    found = encoded(chat, [HI, thought, HI, thought])
    assert found.flaws[0][1].startswith("the chat template leaves out 1 texts or parts of them, the first in the cont")
    assert learned(chat, found) == ["ho<|im_end|>", "<think>\nhm\n</think>\n\nho<|im_end|>"]


@pytest.mark.parametrize("template", ["{{ messages | map(attribute='role') | list | random }}", "{{ lipsum() }}"])
def test_templates_have_no_chance(tmp_path: Path, template: str) -> None:
    chat = opened(tmp_path, template)
    with pytest.raises((TokenizingError, TokenizerError), match=r"No filter named 'random'|'lipsum' is undefined"):
        encoded(chat, [HI, HO])


def test_a_process_that_is_stopped_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_chat_folder(tmp_path, "qwen2")
    found = read_template(tmp_path)
    tokenizer = load_tokenizer("t", tmp_path)
    assert found is not None
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    renderer = Renderer(found, "t")
    chat = ChatTokenizer(tokenizer, found, renderer)
    encoded(chat, [HI, HO])
    assert renderer._process is not None
    monkeypatch.setattr("dataserver.assembly.chat.rendering.DEADLINE_S", 0.1)
    renderer._process.send_signal(19)
    with pytest.raises(TokenizingEndedError, match="takes more than 5 s"):
        encoded(chat, [HI, HO])
    monkeypatch.undo()
    assert encoded(chat, [HI, HO]).targets.any()
    chat.close()


def test_released_forms_know_documents(tmp_path: Path) -> None:
    template = (
        "{% if documents is defined and image_token is defined %}" + TURNS.replace("END", "<|im_end|>") + "{% endif %}"
    )
    chat = opened(tmp_path, template, image_token="<|image_pad|>")
    assert learned(chat, encoded(chat, [HI, HO])) == ["ho<|im_end|>"]
