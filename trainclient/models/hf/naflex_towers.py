"""SigLIP 2's tower of images of any aspect (NaFlex): SigLIP's blocks, patches by a linear layer, scaled positions.

Fixed sizes of SigLIP 2 are of SigLIP's own architecture. As there, a merger begins untrained.
"""

from typing import Any, Final

from trainclient.models.encoder import EncoderConfig
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.mapping import Alone, Entry, Family, table
from trainclient.models.hf.towers import (
    IGNORED,
    SPELLINGS,
    normed_entries,
    read_siglip,
    require_sizes,
    write_square,
)

_SCALING: Final = "antialias"
_PATCHES: Final = "embeddings.patch_embedding.weight"


def _read(fields: Fields, whole: Fields) -> EncoderConfig:
    return read_siglip(fields, whole, position_grid=fields.root("num_patches", 256), position_scaling=_SCALING)


def _entries(config: EncoderConfig) -> list[Entry]:
    """Patches are seen as we see them: (row, column, channel) of a pixel."""
    pixels = config.patch**2 * 3
    others = [entry for entry in normed_entries(config) if entry.theirs != _PATCHES]
    return [table("patch_embed.weight", _PATCHES, config.width, pixels), *others]


def _write(config: EncoderConfig) -> dict[str, Any]:
    require_sizes(config, "siglip2", patch_bias=True)
    shared = {name: value for name, value in write_square(config).items() if name != "image_size"}
    return {**shared, "num_patches": config.position_grid**2, "vision_use_head": False}


def _processor(config: EncoderConfig, max_patches: int | None) -> dict[str, Any]:
    return {
        "image_processor_type": "Siglip2ImageProcessor",
        "max_num_patches": max_patches or config.position_grid**2,
        "patch_size": config.patch,
    }


SIGLIP2: Final = Family(
    "siglip2_vision_model",
    EncoderConfig,
    _read,
    _entries,
    IGNORED,
    SPELLINGS,
    "vision_config",
    Alone(
        "Siglip2VisionModel",
        _write,
        lambda config: config.position_scaling == _SCALING and config.is_bare and not config.class_token,
        _processor,
    ),
)
