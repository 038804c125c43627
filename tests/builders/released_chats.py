"""Released chat templates, by the names that trl has copies of them under, with tokenizers that have their tokens."""

from pathlib import Path
from typing import NamedTuple

from builders.chats import FAMILIES, RELEASED_TEMPLATES, Family, write_family

_QWEN = FAMILIES["qwen3-vl"]._replace(image="")
_LLAMA = Family(
    "",
    ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    tokens=(("bos_token", "<|begin_of_text|>"), ("eos_token", "<|eot_id|>")),
)
_GEMMA = FAMILIES["gemma"]
_PHI = FAMILIES["phi3"]._replace(metaspace=True)
_IDEFICS = Family(
    "",
    ("<|begin_of_text|>", "<|im_start|>", "<image>", "<end_of_utterance>"),
    tokens=(("eos_token", "<end_of_utterance>"),),
    image="<image>",
    has_parts_alone=True,
)
RELEASED = {
    "gemma": _GEMMA,
    "gemma3": _GEMMA._replace(special=(*_GEMMA.special, "<start_of_image>"), image="<start_of_image>", has_system=True),
    "idefics3": _IDEFICS,
    "llama3": _LLAMA,
    "llama3_1": _LLAMA._replace(special=(*_LLAMA.special, "<|python_tag|>", "<|eom_id|>"), has_tools=True),
    "llama3_2": _LLAMA._replace(has_tools=True),
    "llava_next": FAMILIES["llava"]._replace(tokens=(("bos_token", "<s>"), ("eos_token", "</s>"))),
    "phi3": _PHI,
    "phi3_5": _PHI,
    "qwen2_5": _QWEN,
    "qwen2_5_vl": _QWEN._replace(image="<|image_pad|>", has_tools=False),
    "qwen3": _QWEN._replace(has_thoughts=True),
    "qwen3_instruct_2507": _QWEN,
    "qwen3_vl": FAMILIES["qwen3-vl"],
    "smolvlm": _IDEFICS,
}
"""What their conversations may have; the templates are files."""
COPIED = [name for name in RELEASED if (RELEASED_TEMPLATES / f"{name}.jinja").exists()]


class Written(NamedTuple):
    """A released template in two folders, each with the tokenizer."""

    plain: Path
    """As it was released."""
    marked: Path | None
    """With trl's marks around what is learned; None where it has none."""


def write_released(folder: Path, name: str, templates: Path = RELEASED_TEMPLATES) -> Written:
    """Write a released template, and the one that trl trains with."""

    def written(file: str) -> Path | None:
        template = templates / f"{file}.jinja"
        if not template.exists():
            return None
        write_family(folder / file, RELEASED[name]._replace(template=template.read_text()))
        return folder / file

    plain = written(name)
    assert plain is not None
    return Written(plain, written(f"{name}_training"))
