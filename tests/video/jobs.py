"""Jobs with an encoder of images and one of videos."""

from typing import Any

from builders.jobs import module
from serving.harness import job_data

VIDEO = {"max_frames": 8, "min_pixels": 28 * 28, "max_pixels": 16 * 28 * 28}
"""Frames of these jobs."""


def video_job(vit: int = 1, eyes: int = 2, llm: int = 2, balance: str | None = None, **changes: Any) -> dict[str, Any]:
    """A job over `seen` with these degrees; `changes` replace fields of its stream or execution."""
    modules: list[dict[str, Any]] = [
        module("encoder", dp=vit),
        {"name": "eyes", "kind": "encoder", "modality": "video", "dp": eyes},
        module("backbone", dp=llm),
    ]
    if balance is not None:
        modules = [{**m, "balance": balance} for m in modules]
    fields = {
        "modules": modules,
        "datasets": [{"name": "seen"}],
        "sizing": {"max_patches": 64, "video": VIDEO},
        "generation": {"ratio": "0"},
        "microbatch": 2,
        "end": {"steps": 2},
    }
    return job_data(**{**fields, **changes})
