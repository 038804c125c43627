"""Jobs with encoders of images, audio and videos beside one backbone."""

from typing import Any

from audio.jobs import AUDIO
from builders.jobs import module
from video.jobs import VIDEO


def three_encoders(vit: int = 1, ears: int = 1, eyes: int = 1, llm: int = 1, **fields: Any) -> dict[str, Any]:
    """What such a job says of modules with these degrees, and of items; `fields` are those of all modules."""
    modules = [
        module("encoder", dp=vit),
        {"name": "ears", "kind": "encoder", "modality": "audio", "dp": ears},
        {"name": "eyes", "kind": "encoder", "modality": "video", "dp": eyes},
        module("backbone", dp=llm),
    ]
    return {
        "modules": [{**m, **fields} for m in modules],
        "sizing": {"max_patches": 64, "audio": AUDIO, "video": VIDEO},
        "generation": {"ratio": "0"},
    }
