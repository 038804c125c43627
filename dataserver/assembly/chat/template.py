"""The chat template of a tokenizer's folder: text that is data, and run nowhere but in the process of `rendering`."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dataserver.assembly.chat.expansion import Expansion, expansion_of, known_processors
from dataserver.assembly.hugging_face import TokenizerError, read_bounded

RENDERING_VERSION: Final = 1
"""Grows where the same conversation and template give other ids or targets."""
CONFIG: Final = "tokenizer_config.json"
_TOOLS: Final = "tool_use"
"""Name of the template for conversations with tools, where there are several."""
_MAX_TEMPLATE_CHARS: Final = 1 << 20
_MAX_NAMED: Final = 64


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template, and what it is given of its tokenizer."""

    text: str
    text_for_tools: str
    """Used where a conversation has tools; empty without one."""
    tokens: dict[str, str]
    """Special tokens by the names that templates know them by, as `bos_token`."""
    image_token: str
    """What the files of the folder call the token that stands for an image; empty where they name none."""
    expansion: Expansion | None
    """What the processor of the folder writes around it; None where it writes nothing."""
    processor: str
    """Its class; empty where the files name none. It decides which clips and videos are refused, not how those that are
    rendered become ids."""

    def digest(self, media: Collection[str] = ()) -> str:
        """SHA-256, hexadecimal, of all that decides what is rendered, and of the rules that make ids of it.

        Args:
            media: `audio`, `video`, as far as the dataset serves them: those that the processor is not known to write
                tokens for are refused, which folders of other processors do not.
        """
        parts = [RENDERING_VERSION, self.text, self.text_for_tools, sorted(self.tokens.items()), self.image_token]
        if self.expansion is not None:
            parts.append(list(self.expansion))
        if refused := sorted(kind for kind in media if known_processors(self.processor, kind)):
            parts.append({"refused": refused})
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_template(folder: Path) -> ChatTemplate | None:
    """Read the template of a folder, where transformers looks for it; None where there is none.

    Raises:
        TokenizerError: a file of the folder cannot be used.
    """
    config = _read_json(folder / CONFIG)
    named = _named(folder, config)
    text = named.get("default", "")
    if not text:
        return None
    for name, found in named.items():
        if len(found) > _MAX_TEMPLATE_CHARS:
            raise TokenizerError(
                f"the chat template {name} of {folder} has {len(found)} characters; at most {_MAX_TEMPLATE_CHARS} are "
                "allowed"
            )
    tokens = {name: token for name, value in config.items() if name.endswith("_token") and (token := _content(value))}
    processor = _processor(folder, config)
    expansion = expansion_of(processor, tokens)
    image_token = expansion.image if expansion else tokens.get("image_token", "") or _image_token(folder)
    return ChatTemplate(text, named.get(_TOOLS, ""), tokens, image_token, expansion, processor)


def _named(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates of a folder by name: files of their own go before the configuration, as in transformers."""
    found: dict[str, str] = {}
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    for given in (legacy, config.get("chat_template")):
        if isinstance(given, str):
            found["default"] = given
        elif isinstance(given, list):
            entries = [entry for entry in given[:_MAX_NAMED] if isinstance(entry, dict)]
            found |= {
                str(entry.get("name")): text for entry in entries if isinstance(text := entry.get("template"), str)
            }
    files = {
        "default": folder / "chat_template.jinja",
        _TOOLS: folder / "additional_chat_templates" / f"{_TOOLS}.jinja",
    }
    for name, path in files.items():
        if path.is_file():
            try:
                found[name] = read_bounded(path).decode()
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{path} is not UTF-8 (byte {error.start}); write it again as text") from error
    return found


def _image_token(folder: Path) -> str:
    """What the processor's or the model's file says stands for an image."""
    return _content(_read_json(folder / "processor_config.json").get("image_token"))


def _processor(folder: Path, config: dict[str, Any]) -> str:
    """The class of the processor that the files of a folder name; empty where they name none."""
    files = (folder / "processor_config.json", folder / "preprocessor_config.json")
    named = [of.get("processor_class") for of in (*map(_read_json, files), config)]
    return next((name for name in named if isinstance(name, str)), "")


def _content(token: Any) -> str:
    """The text of a token, which is written as such or as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_bounded(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} holds a {type(found).__name__}; an object is required")
    return found
