"""Jobs with an encoder of images and one of audio."""

from typing import Any

from builders.jobs import module
from serving.harness import job_data

AUDIO = {"bins": 80, "max_seconds": 2}
"""Spectrograms of these jobs."""


def audio_job(vit: int = 1, ears: int = 2, llm: int = 2, balance: str | None = None, **changes: Any) -> dict[str, Any]:
    """A job over `heard` with these degrees; `changes` replace fields of its stream or execution."""
    modules: list[dict[str, Any]] = [
        module("encoder", dp=vit),
        {"name": "ears", "kind": "encoder", "modality": "audio", "dp": ears},
        module("backbone", dp=llm),
    ]
    if balance is not None:
        modules = [{**m, "balance": balance} for m in modules]
    fields = {
        "modules": modules,
        "datasets": [{"name": "heard"}],
        "sizing": {"max_patches": 64, "audio": AUDIO},
        "generation": {"ratio": "0"},
        "microbatch": 2,
        "end": {"steps": 2},
    }
    return job_data(**{**fields, **changes})
