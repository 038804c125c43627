"""What the configuration of a run says of its modules: sizes, weights to start from, adapters, sharding."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import tyro
from pydantic import ConfigDict, Field

from trainclient.training.config_base import SAYS_ITSELF, Options

Size = Annotated[
    Annotated[int, Field(ge=1, le=2**24)] | None, tyro.conf.arg(help_behavior_hint="(default: that of the preset)")
]
Weights = Annotated[Path | None, SAYS_ITSELF]
NOT_MODEL: Final = frozenset({"sharding", "lora", "freeze_tower", "other_tokenizer"})
"""Fields of the models below that change nothing in what a model is."""
NOT_SIZES: Final = NOT_MODEL | {"preset", "weights", "use", "options"}
"""Fields of the models below that are not sizes."""


class Sharding(StrEnum):
    """What the data-parallel ranks of a module hold of its parameters and of the optimizer's state."""

    NONE = "none"
    """All of them on every rank."""
    ZERO2 = "zero2"
    """A share each. Parameters are gathered once before a step, and gradients summed into shares once after it, so that
    ranks wait for each other only there."""
    ZERO3 = "zero3"
    """A share each. Every block is gathered for each pass of each microbatch, and its gradients are summed into shares.
    Least memory, but the ranks of a module wait for each other in every block."""


class Projection(StrEnum):
    """Linear layers of blocks; a gate is there in gated MLPs alone."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"
    GATE = "gate"
    UP = "up"
    DOWN = "down"


class LoraConfig(Options):
    """Low-rank adapters to train instead of the weights."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Inner width of each adapter; 0 adds none, and trains all weights."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: Annotated[tuple[Projection, ...], Field(min_length=1)] = (
        Projection.QUERY,
        Projection.KEY,
        Projection.VALUE,
        Projection.OUTPUT,
    )
    """Linear layers of each block to add adapters to."""


class ModelSizes(Options):
    """Sizes that all transformers have: a preset, whose sizes may be replaced one by one."""

    preset: str = "tiny"
    """Name of the preset whose sizes hold unless another is given."""
    layers: Size = None
    """Number of transformer blocks."""
    width: Size = None
    """Width of the residual stream."""
    heads: Size = None
    """Number of attention heads."""
    mlp_width: Size = None
    """Width of the hidden layer of each MLP."""


class GeneratorModel(ModelSizes):
    """Sizes of a generator: a preset, whose sizes may be replaced one by one."""

    preset: str = "tiny"
    """Name of a preset (tiny, dit-1b)."""
    sharding: Sharding = Sharding.NONE
    """What each data-parallel rank holds: none (everything), zero2 or zero3 (a share, by FSDP2; docs/training.md)."""


class EncoderModel(ModelSizes):
    """Sizes of an encoder or an image tower: a preset, whose sizes may be replaced one by one, or those of given
    weights."""

    preset: str = "tiny"
    """Name of a preset (tiny, vit-h; for audio tiny, whisper-large)."""
    weights: Weights = None
    """Folder of a Hugging Face checkpoint to start from, instead of a preset: SigLIP, SigLIP 2, CLIP or DINOv2 (these
    two not for image towers), for audio Whisper or Qwen2-Audio, or a whole vision-language model, whose tower and
    projector are read."""
    sharding: Sharding = Sharding.NONE
    """What each data-parallel rank holds: none (everything), zero2 or zero3 (a share, by FSDP2; docs/training.md)."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters to train instead of the weights of blocks. The layer that turns features into rows is trained
    as a whole."""
    freeze_tower: bool = False
    """Train only the projector, which turns features into rows of the backbone. Not for image towers."""


class BackboneModel(ModelSizes):
    """Sizes of a backbone: a preset, whose sizes may be replaced one by one, or those of given weights."""

    preset: str = "tiny"
    """Name of a preset (tiny, llama3-7b, llama3-13b, llama3-70b)."""
    groups: Size = None
    """Number of key and value heads."""
    positions: Annotated[Annotated[int, Field(ge=1, le=2**30)] | None, SAYS_ITSELF] = None
    """Longest sequence in tokens, if the job's seq_len is longer than what the given weights were trained for
    (max_position_embeddings)."""
    vocabulary: Annotated[Annotated[int, Field(ge=1, le=2**20)] | None, SAYS_ITSELF] = None
    """Number of rows of the embedding and the head, if the job's tokenizer has more tokens than the given weights; new
    rows begin as the mean of the others."""
    other_tokenizer: bool = False
    """Train although the tokenizer in the folder of the weights is not the job's: each id means the same in both, or is
    still to be learned."""
    weights: Weights = None
    """Folder of a Hugging Face checkpoint to start the backbone, or a text tower, from, instead of a preset: Llama,
    Mistral, Qwen2, Qwen3, Phi-3, Gemma, Gemma 3, or a whole vision-language model, whose language model is read."""
    sharding: Sharding = Sharding.NONE
    """What each data-parallel rank holds: none (everything), zero2 or zero3 (a share, by FSDP2; docs/training.md)."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters to train instead of the weights."""


class WholeModel(Options):
    """One released model for several modules."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    folder: Annotated[Path | None, tyro.conf.arg(name="from", help_behavior_hint="")] = Field(None, alias="from")
    """Folder of a whole vision-language model in Hugging Face's layout: the job's encoder and backbone start from it,
    unless they have weights of their own."""


class NamedModel(BackboneModel):
    """Settings of one module that differ from those of its kind."""

    use: str | None = None
    """package.module:Name of a class of your own (docs/training.md). It takes `options`, and no sizes."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""
    freeze_tower: bool = False
    """Train the projector of an encoder alone; of one of your own, what its network's `projecting` names."""
