"""Which checkpoints our models can be, by `model_type`, and why others are refused."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from trainclient.models.hf.audio_towers import QWEN2_AUDIO, WHISPER
from trainclient.models.hf.backbones import LLAMA, MISTRAL, QWEN2, QWEN3
from trainclient.models.hf.class_token_towers import DINOV2, DINOV2_REGISTERS
from trainclient.models.hf.fields import Fields
from trainclient.models.hf.files import PretrainedError
from trainclient.models.hf.gemma import GEMMA, GEMMA3
from trainclient.models.hf.mapping import Family, Sizes
from trainclient.models.hf.naflex_towers import SIGLIP2
from trainclient.models.hf.phi import PHI3
from trainclient.models.hf.qwen_towers import QWEN2_VL
from trainclient.models.hf.towers import CLIP, SIGLIP
from trainclient.models.hf.whole_models import WHOLE_MODELS

FAMILIES: Final[Mapping[str, Family[Any]]] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "phi3": PHI3,
        "gemma": GEMMA,
        "gemma3_text": GEMMA3,
        "clip": CLIP,
        "clip_vision_model": CLIP,
        "siglip": SIGLIP,
        "siglip_vision_model": SIGLIP,
        "siglip2": SIGLIP2,
        "siglip2_vision_model": SIGLIP2,
        "dinov2": DINOV2,
        "dinov2_with_registers": DINOV2_REGISTERS,
        "qwen2_vl_vision": QWEN2_VL,
        "whisper": WHISPER,
        "qwen2_audio": QWEN2_AUDIO,
    }
)
"""Models of one part; of CLIP and SigLIP the tower, of Whisper the encoder, of Qwen2-Audio tower and projector."""

_STATE_SPACE: Final = (
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "mamba", "mamba2", "bamba", "jamba"),
    *("falcon_h1", "nemotron_h", "zamba2", "granitemoehybrid"),
)
_ROUTED: Final = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_omni_moe", "deepseek_v2", "deepseek_v3", "llama4"),
    *("gpt_oss", "olmoe", "phimoe", "granitemoe", "glm4_moe", "glm4v_moe", "ernie4_5_moe"),
)
_REMOTE: Final = (
    "its model is code in the checkpoint, and no code of a checkpoint is run; take the one that transformers has "
    "itself, such as those whose names end in -hf"
)
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(_STATE_SPACE, "it has linear attention or state-space layers, and ours are attention alone"),
        **dict.fromkeys(_ROUTED, "it routes tokens to experts, and our MLPs are dense"),
        "llava_next": "it scales the rows of tiles to no limit, and LLaVA-OneVision's are carried alone",
        **dict.fromkeys(("internvl_chat", "minicpmv", "phi3_v"), _REMOTE),
        "gemma2": "it caps scores and logits, and ours have no caps",
        **dict.fromkeys(("gemma3n", "gemma4", "gemma4_text"), "its layers share keys and values or are routed"),
        "mllama": "its text attends to images across, and our backbones take images as tokens",
        "paligemma": "its prompt is seen both ways, and our backbones are causal",
        "dinov3_vit": "its patches are rotated by their share of the side, and its class token and registers are not",
        **dict.fromkeys(("idefics2", "blip-2", "instructblip"), "learned queries make the rows of its images"),
        "phi4_multimodal": "it has adapters of its own for images and for audio",
        **dict.fromkeys(
            ("qwen2_5_omni", "qwen2_5_omni_audio_encoder"),
            "its audio tower attends within chunks of two seconds, and ours to whole clips",
        ),
    }
)
"""What is known and not carried, with the reason."""


def families_of(whole: Fields) -> tuple[Family[Any], ...]:
    """The parts of a checkpoint: an encoder and a backbone, or one of them.

    Raises:
        PretrainedError: our models cannot be it; the message has the reason.
    """
    name = whole.data.get("model_type")
    if isinstance(name, str) and name in WHOLE_MODELS:
        found = WHOLE_MODELS[name].families(whole)
    elif isinstance(name, str) and name in FAMILIES:
        found = (FAMILIES[name],)
    elif isinstance(name, str) and name in REFUSED:
        raise whole.refusal("model_type", f"it cannot be trained here: {REFUSED[name]}")
    elif whole.has("auto_map"):
        raise whole.refusal("model_type", f"it cannot be trained here: {_REMOTE}")
    else:
        raise whole.refusal("model_type", f"one of {', '.join([*FAMILIES, *WHOLE_MODELS])} is required")
    if whole.has("quantization_config"):
        raise whole.refusal("quantization_config", "quantized weights cannot be trained; take the original checkpoint")
    return found


def family_of(config: Sizes, base: str = "") -> Family[Any]:
    """The architecture as which a model of these sizes is exported by itself; PretrainedError if there is none.

    Where several have these sizes (Mistral without windows is Llama), it is that of `base`, else the first one.
    """
    families = FAMILIES.values()
    for family in sorted(families, key=lambda family: family.name != base):
        if family.kind is type(config) and family.alone is not None and family.alone.suits(config):
            return family
    raise PretrainedError(
        "transformers has no model that is this module alone: it is a part of a larger one. Export the whole model: "
        "leave --module out, and give --base, the folder that it began as"
    )
