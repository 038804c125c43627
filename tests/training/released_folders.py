"""Folders as released models have them, with tiny random models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from builders.chats import write_chat_folder
from models.hf.tiny import randomise, save
from models.hf.tiny_wholes import QWEN, SQUARE, TEXT, save_released
from tokenizers import Tokenizer

VOCAB = 384
WIDTH = 32
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}}


def llama(folder: Path, vocabulary: int = 300) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    randomise(model, 1)
    return save(model, folder)


def siglip(folder: Path, patch: int = 8) -> Path:
    config = transformers.SiglipVisionConfig(
        hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        patch_size=patch, vision_use_head=False,
    )  # fmt: skip
    torch.manual_seed(2)
    model = transformers.SiglipVisionModel(config)
    randomise(model, 2)
    return save(model, folder)


@dataclass(frozen=True)
class Tuned:
    """A family whose tiny model is fine-tuned."""

    chats: str
    """Form of its tokenizer and template."""
    sizing: dict[str, Any]
    """Of the job."""
    processor: Any
    """Of images, by transformers."""

    def config(self, tokenizer: Tokenizer) -> Any:
        """Of a tiny model with these ids."""
        ids = {"image_token_id": tokenizer.token_to_id(self.image)}
        if self.chats == "llava":
            vision = {**SQUARE, "patch_size": 14, "image_size": 56, "model_type": "clip_vision_model"}
            text = {**TEXT, "model_type": "llama", "vocab_size": VOCAB}
            return transformers.LlavaConfig(
                text_config=text, vision_config=vision, image_token_index=ids["image_token_id"]
            )
        ids |= {f"vision_{end}_token_id": tokenizer.token_to_id(f"<|vision_{end}|>") for end in ("start", "end")}
        vision = {**QWEN, "patch_size": 14, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        text = {**TEXT, **SECTIONS, "vocab_size": VOCAB}
        return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, video_token_id=VOCAB - 1, **ids)

    @property
    def image(self) -> str:
        return "<image>" if self.chats == "llava" else "<|image_pad|>"


FAMILIES = {
    "qwen2-vl": Tuned(
        "qwen2-vl",
        {"patch": 14, "merge": 2, "rule": "qwen", "min_pixels": 3136, "max_pixels": 12544},
        transformers.Qwen2VLImageProcessorPil(min_pixels=3136, max_pixels=12544),
    ),
    "llava": Tuned(
        "llava",
        {"patch": 14, "merge": 1, "rule": "crop", "side": 56},
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
    ),
}


def base_folder(family: Tuned, folder: Path) -> Path:
    """A folder as released ones are: model, tokenizer, template, processor."""
    write_chat_folder(folder, family.chats)
    torch.manual_seed(0)
    config = family.config(Tokenizer.from_file(str(folder / "tokenizer.json")))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    randomise(model, 0)
    save_released("llava" if family.chats == "llava" else "qwen2-vl", model, folder)
    family.processor.save_pretrained(folder)
    return folder
