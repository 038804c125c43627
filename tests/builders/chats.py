"""Small tokenizers with chat templates of the forms that released families have, and conversations for them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


class Family(NamedTuple):
    """A form of templates, and what its conversations may have."""

    template: str
    special: tuple[str, ...]
    """Special tokens."""
    tags: tuple[str, ...] = ()
    """Added tokens that are not special."""
    tokens: tuple[tuple[str, str], ...] = ()
    """Names that the template is given, as `bos_token`."""
    image: str = ""
    """What it writes for an image."""
    has_system: bool = True
    has_tools: bool = False
    has_thoughts: bool = False
    has_parts_alone: bool = False
    """Whether the template takes no content that is a text."""
    metaspace: bool = False
    """Whether its vocabulary is of SentencePiece's form."""


_PARTS = (
    "{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}"
)
_CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{%- if message.content is string %}"
    "{{- message.content }}{%- else %}" + _PARTS + "{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_CALLS = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}"
    "{{- messages[0].content + '\n\n' }}"
    "{%- endif %}{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set content = message.content %}{%- set thought = '' %}"
    "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{%- if (loop.first and content) or not loop.first %}"
    "{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
_HEADERS = (
    "{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{- message.content | tojson }}{{- '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{{- \'{"name": "\' + message.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}{%- else %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_INSTRUCTIONS = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set rest = messages[1:] %}"
    "{%- else %}{%- set rest = messages %}{%- endif %}{{- bos_token }}{%- for message in rest %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}"
    "{%- endif %}{%- if message.role == 'user' %}{%- if loop.first and system is defined %}"
    "{{- '[INST] ' + system + '\n\n' + message.content + '[/INST]' }}{%- else %}"
    "{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}"
    "{%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}{%- endfor %}"
)
_TURNS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_ROLES = (
    "{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
_COLONS = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ part['text'] + ' ' }}{% endfor %}{% else %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
_CAPITALS = (  # as transformers has it, which gives it to conversations with videos
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'] is string %}"
    "{{': ' + message['content']}}{% else %}{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}"
    "{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% elif line['type'] == 'video' %}{{ '<video>' }}{% endif %}"
    "{% endfor %}{% endif %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
RELEASED_TEMPLATES = Path(__file__).with_name("released_templates")
"""Copies of released templates, `NAME.jinja`."""
FAMILIES = {
    "qwen2": Family(_CHATML, _IM),
    "qwen2-vl": Family(
        _CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
        (*_IM, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        image="<|image_pad|>",
    ),
    "qwen3": Family(
        _CALLS, _IM, ("<think>", "</think>", "<tool_call>", "</tool_call>"), has_tools=True, has_thoughts=True
    ),
    "llama3": Family(
        _HEADERS,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        tokens=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
        has_tools=True,
    ),
    "mistral": Family(
        _INSTRUCTIONS,
        ("<s>", "</s>", "[INST]", "[/INST]"),
        tokens=(("bos_token", "<s>"), ("eos_token", "</s>")),
        metaspace=True,
    ),
    "gemma": Family(
        _TURNS,
        ("<bos>", "<start_of_turn>", "<end_of_turn>"),
        tokens=(("bos_token", "<bos>"),),
        has_system=False,
        metaspace=True,
    ),
    "phi3": Family(
        _ROLES,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        tokens=(("eos_token", "<|endoftext|>"),),
    ),
    "llava": Family(_COLONS, ("<s>", "</s>", "<image>"), image="<image>", has_parts_alone=True, metaspace=True),
    "qwen3-vl": Family(
        (RELEASED_TEMPLATES / "qwen3_vl.jinja").read_text(),
        (*_IM, *_VISION),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        image="<|image_pad|>",
        has_tools=True,
    ),
}
"""By the released models whose templates have that form; Qwen3-VL's is its own."""
_FAKE = "<fake_token_around_image>"
_TAGS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 5))
EXPANDED = {
    "Gemma3Processor": Family(
        _TURNS.replace("message['content'] | trim", "content | trim").replace(
            "{{ '<start_of_turn>'",
            "{% set content %}{% if message.content is string %}{{ message.content }}{% else %}"
            + _PARTS.replace("IMAGE", "<start_of_image>")
            + "{% endif %}{% endset %}{{ '<start_of_turn>'",
        ),
        ("<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        tokens=(
            ("bos_token", "<bos>"),
            ("boi_token", "<start_of_image>"),
            ("eoi_token", "<end_of_image>"),
            ("image_token", "<image_soft_token>"),
        ),
        image="<start_of_image>",
        has_system=False,
    ),
    "InternVLProcessor": Family(
        _CHATML.replace("IMAGE", "<IMG_CONTEXT>\n"),
        (*_IM, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        tokens=(
            ("start_image_token", "<img>"),
            ("end_image_token", "</img>"),
            ("context_image_token", "<IMG_CONTEXT>"),
            ("video_token", "<video>"),
        ),
        image="<IMG_CONTEXT>",
    ),
    "Idefics3Processor": Family(
        (RELEASED_TEMPLATES / "idefics3.jinja").read_text(),
        ("<|begin_of_text|>", "<image>", _FAKE, "<global-img>", "<end_of_utterance>", *_TAGS),
        tokens=(("image_token", "<image>"),),
        image="<image>",
        has_parts_alone=True,
    ),
    "SmolVLMProcessor": Family(
        _CAPITALS,
        (*_IM, "<image>", _FAKE, "<global-img>", "<end_of_utterance>", *_TAGS),
        tokens=(
            ("image_token", "<image>"),
            ("fake_image_token", _FAKE),
            ("global_image_token", "<global-img>"),
            ("end_of_utterance_token", "<end_of_utterance>"),
        ),
        image="<image>",
    ),
    "LlavaOnevisionProcessor": Family(
        _CHATML.replace("IMAGE", "<image>\n"),
        (*_IM, "<image>", "<video>"),
        tokens=(("image_token", "<image>"), ("video_token", "<video>")),
        image="<image>",
    ),
    "Qwen3VLProcessor": FAMILIES["qwen3-vl"],
}
"""By the class of the processor: those that write tokens around an image or cut it into tiles, and Qwen3-VL's."""
_AUDIO = (
    "{%- for message in messages %}{%- if loop.first and message.role != 'system' %}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\n' }}{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{%- if part.type == 'audio' %}"
    "{{- 'Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}"
    "{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MEDIA = {
    "Qwen2VLProcessor": Family(
        _CHATML.replace(
            "IMAGE",
            "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
            "<|vision_start|><|video_pad|><|vision_end|>",
        ),
        (*_IM, *_VISION),
        image="<|image_pad|>",
    ),
    "Qwen2AudioProcessor": Family(_AUDIO, (*_IM, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")),
}
"""Those that take videos beside images, or clips, by the class of the processor."""

_WORDS = [
    *"the cat sat on a mat; what is it? user assistant system model USER: 0 42 x=1 {a} <b>".split(),  # noqa: SIM905
    "\u00e9t\u00e9",
    "\u4f60\u597d",
    "\U0001f600",
    '"q"',
    "it's",
]


def write_chat_folder(folder: Path, name: str) -> Path:
    """Write the tokenizer and the template of a family as its folder has them."""
    write_family(folder, (FAMILIES | EXPANDED | MEDIA)[name], in_file=name == "qwen3")
    if name in EXPANDED | MEDIA:
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": name}))
    return folder


def write_family(folder: Path, family: Family, in_file: bool = True) -> None:
    """Write a tokenizer and its template.

    Args:
        folder: where.
        family: what they are.
        in_file: whether the template has a file of its own, and does not lie in the tokenizer's configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _model(family).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(family.tokens)}
    if in_file:
        (folder / "chat_template.jinja").write_text(family.template)
    else:
        config["chat_template"] = family.template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _model(family: Family) -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("i", "s"), ("s", "e"), ("se", "r"), ("\n", "\n")]
    if family.metaspace:
        letters = [chr(code) for code in range(33, 127)]
        vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *letters]
        merges = [(a, b) for a, b in merges if "\n" not in a]
        vocabulary += [a + b for a, b in merges]
        model = Tokenizer(
            models.BPE(
                vocab={word: i for i, word in enumerate(vocabulary)},
                merges=merges,
                unk_token="<unk>",
                byte_fallback=True,
                fuse_unk=True,
            )
        )
        model.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        model.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        merges = [(a.replace("\n", "\u010a"), b.replace("\n", "\u010a")) for a, b in merges]
        vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
        model = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(vocabulary)}, merges=merges))
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in family.special])
    model.add_tokens([AddedToken(word, special=False, normalized=False) for word in family.tags])
    return model


def draw_conversation(family: Family, rng: random.Random, num_images: int | None = None) -> dict[str, Any]:
    """Draw a conversation as OpenAI has them: messages, tools, and where the images go."""
    messages: list[dict[str, Any]] = []
    if family.has_system and rng.random() < 0.5:
        messages.append({"role": "system", "content": draw_text(rng)})
    for _ in range(rng.randint(1, 4)):
        messages += _exchange(family, rng)
    if family.image:
        users = [message for message in messages if message["role"] == "user"]
        for _ in range(rng.randint(0, 3) if num_images is None else num_images):
            user = rng.choice(users)
            parts = (
                user["content"] if isinstance(user["content"], list) else [{"type": "text", "text": user["content"]}]
            )
            user["content"] = [{"type": "image"}, {"type": "text", "text": draw_text(rng)}, *parts]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    has_calls = any("tool_calls" in message for message in messages)
    return {"messages": messages, "tools": [tool] if has_calls and rng.random() < 0.8 else []}


def _exchange(family: Family, rng: random.Random) -> list[dict[str, Any]]:
    answer: dict[str, Any] = {"role": "assistant", "content": draw_text(rng)}
    if family.has_thoughts and rng.random() < 0.4:
        answer["content"] = f"<think>\n{draw_text(rng)}\n</think>\n\n{answer['content']}"
    found: list[dict[str, Any]] = [{"role": "user", "content": draw_text(rng)}]
    if family.has_tools and rng.random() < 0.4:
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": draw_text(rng), "n": 3}}}
        found.append({"role": "assistant", "content": "", "tool_calls": [call]})
        found.append({"role": "tool", "content": draw_text(rng)})
    return [*found, answer]


def draw_text(rng: random.Random) -> str:
    """Some words, of several scripts, at times with white space around them."""
    text = rng.choice([" ", " ", "\n"]).join(rng.choices(_WORDS, k=rng.randint(1, 8)))
    return rng.choice(["{}", "{}", "{}", " {}", "{}\n", "\n{} "]).format(text)


def add_media(messages: Sequence[dict[str, Any]], rng: random.Random, kinds: Sequence[str]) -> None:
    """Add a part of each kind, with a text behind it, to messages of users drawn at random."""
    users = [message for message in messages if message["role"] == "user"]
    for kind in kinds:
        user = rng.choice(users)
        content = user["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        user["content"] = [{"type": kind}, {"type": "text", "text": draw_text(rng)}, *parts]


def as_asked(family: Family, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the template of a family takes them."""
    if not family.has_parts_alone:
        return [*messages]
    contents = [message["content"] for message in messages]
    parts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [{**message, "content": of} for message, of in zip(messages, parts, strict=True)]


def image_count(messages: Sequence[dict[str, Any]]) -> int:
    """Images of a conversation."""
    return sum(str(message["content"]).count("'type': 'image'") for message in messages)
