"""Jobs whose ranks run encoder and backbone themselves."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration


def whole_job(ranks: int, end: dict[str, int], **stream: Any) -> dict[str, Any]:
    """Images stay with their sequences; the stream is the same for any number of ranks."""
    return {
        "stream": {
            "datasets": [{"name": "pairs"}, {"name": "docs"}],
            "seq_len": 256,
            "global_batch": 8,
            "sizing": {"patch": 14, "merge": 2, "max_patches": 64},
            **stream,
        },
        "execution": {
            "modules": [
                {"name": "vision", "kind": "encoder", "dp": ranks},
                {"name": "llm", "kind": "backbone", "dp": ranks},
            ],
            "identity_routing": True,
            "end": end,
        },
    }


def one_pass(ranks: int) -> dict[str, Any]:
    """A pass in 6 steps, each of several microbatches, whose images have little room."""
    job = whole_job(ranks, {"epochs": 1}, global_batch=4)
    job["execution"]["modules"][0]["memory"] = {"budget_bytes": 300, "unit_bytes": 1}
    return job


def pass_with_parity(ranks: int) -> dict[str, Any]:
    """A pass in 7 steps of up to 9 microbatches on one rank; in each of them all ranks have images or none has."""
    weights = {"pairs": "0.3", "docs": "0.15", "texts": "0.55"}
    mixture = [{"name": name, "weight": weight} for name, weight in weights.items()]
    job = whole_job(ranks, {"epochs": 1}, datasets=mixture)
    job["execution"]["modules"][0]["memory"] = {"budget_bytes": 300, "unit_bytes": 1}
    job["execution"]["modality_parity"] = True
    return job


def text_job(seed: int = 0) -> dict[str, Any]:
    """Texts alone, for one rank without an encoder."""
    return {
        "stream": {"datasets": [{"name": "texts"}], "seq_len": 256, "global_batch": 4, "seed": seed},
        "execution": {"modules": [{"name": "llm", "kind": "backbone"}], "end": {"epochs": 1}},
    }


def mixed_job(ranks: int, end: dict[str, int], **execution: Any) -> dict[str, Any]:
    """Samples of text alone among pairs, each a sequence of its own: no wave has parity by itself."""
    mixture = [{"name": "pairs", "weight": "0.6"}, {"name": "texts", "weight": "0.4"}]
    job = whole_job(ranks, end, datasets=mixture, packing={"enabled": False})
    job["execution"] |= {"modality_parity": True, **execution}
    return job


def tiny_model(folder: Path) -> Path:
    """A random Qwen2-VL, saved."""
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        },
        vision_config={
            "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
        image_token_id=290, video_token_id=291, vision_start_token_id=292, vision_end_token_id=293,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    return folder
