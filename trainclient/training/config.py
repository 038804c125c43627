"""Configuration of a training run, from a YAML file, from flags, or both."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

import torch
import tyro
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dataserver.planning.jobspec import MAX_TEXT_BYTES, TextError, parse_yaml
from trainclient.stream.endpoint import Timeouts


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


_SAYS_ITSELF = tyro.conf.arg(help_behavior_hint="")
"""The help text says what holds without the flag."""
Size = Annotated[
    Annotated[int, Field(ge=1, le=2**24)] | None, tyro.conf.arg(help_behavior_hint="(default: that of the preset)")
]


class ImageModuleModel(_Config):
    """Sizes of an encoder or generator: a preset, of which single sizes may be replaced."""

    preset: str = "tiny"
    """Name of a preset (encoder: tiny, vit-h; generator: tiny, dit-1b)."""
    layers: Size = None
    """Transformer blocks."""
    width: Size = None
    """Width of the residual stream."""
    heads: Size = None
    """Attention heads."""
    mlp_width: Size = None
    """Width inside the MLP."""


class BackboneModel(_Config):
    """Sizes of a backbone: a preset, of which single sizes may be replaced."""

    preset: str = "tiny"
    """Name of a preset (tiny, llama3-7b, llama3-13b, llama3-70b)."""
    layers: Size = None
    """Transformer blocks."""
    width: Size = None
    """Width of the residual stream."""
    mlp_width: Size = None
    """Width inside the gated MLP."""
    heads: Size = None
    """Attention heads."""
    groups: Size = None
    """Key and value heads."""


class OptimizerConfig(_Config):
    """AdamW with linear warm-up."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Learning rate after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises from lr / warmup_steps to lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of the gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean of their squares."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the mean square."""
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradients of all modules together; 0 does not clip."""


class CheckpointConfig(_Config):
    """Checkpoints."""

    directory: Annotated[Path | None, _SAYS_ITSELF] = None
    """Folder that all processes see; without one nothing is saved. Training resumes from the newest one in it."""
    every: Annotated[int, Field(ge=1)] = 100
    """Steps between two; one more is written when training ends."""
    keep: Annotated[int, Field(ge=1)] = 3
    """How many of the newest to keep."""


class Dtype(StrEnum):
    """Types of the parameters, of all activations, and of what moves between modules."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def torch(self) -> torch.dtype:
        """The same in torch."""
        return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[self.value]


class Device(StrEnum):
    """Where to compute."""

    AUTO = "auto"
    """The GPU of this process's LOCAL_RANK if there is one, otherwise the CPU."""
    CPU = "cpu"
    CUDA = "cuda"


_REQUIRED = tyro.conf.arg(help_behavior_hint="(required)")


class TrainConfig(_Config):
    """A training run."""

    job: Annotated[Path | None, _REQUIRED] = None
    """Job specification, YAML or JSON."""
    servers: Annotated[str, _REQUIRED] = ""
    """Data servers as HOST:PORT,HOST:PORT."""
    encoder: ImageModuleModel = ImageModuleModel()
    """Sizes of the encoder."""
    backbone: BackboneModel = BackboneModel()
    """Sizes of the backbone."""
    generator: ImageModuleModel = ImageModuleModel()
    """Sizes of the generator."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    text_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the text loss."""
    image_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the generator's loss."""
    dtype: Dtype = Dtype.FLOAT32
    """Type of parameters and activations. With bfloat16 the optimizer keeps float32 copies of the parameters."""
    device: Device = Device.AUTO
    """Where to compute."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping its activations."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial parameters; the data has the job's."""
    steps: Annotated[Annotated[int, Field(ge=1)] | None, _SAYS_ITSELF] = None
    """Stop before this step, if the job does not end earlier."""
    max_invalid_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of images, counted over all steps of the run, that may turn out to be undecodable; the first
    thousand images count as one thousand. Beyond it, training stops."""
    metrics: Annotated[Path | None, _SAYS_ITSELF] = None
    """File to which a JSON line is appended after every step."""
    progress: bool = True
    """Show a line per step on a terminal."""
    threads: Annotated[Annotated[int, Field(ge=1)] | None, _SAYS_ITSELF] = None
    """CPU threads of each process; by default the machine's cores divided by its processes."""
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Seconds to wait for another process before training ends with an error."""
    first_answer_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """Seconds to wait for the first answer of a data server: trainers may start before their servers."""
    stop_grace_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Seconds to finish the step in hand and save it, after Ctrl-C or SIGTERM."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.device is Device.CUDA and not torch.cuda.is_available():
            raise ValueError("device is cuda but torch finds no GPU; use --device cpu or install a CUDA build of torch")
        return self

    @property
    def timeouts(self) -> Timeouts:
        """Deadlines of all calls to data servers."""
        return Timeouts(first_answer=self.first_answer_s)

    def require_inputs(self) -> tuple[Path, str]:
        """The job file and the servers; ConfigError if one is missing."""
        if self.job is None:
            raise ConfigError("no job is given; add --job JOB.yaml, the specification that the data servers plan")
        if not self.job.is_file():
            raise ConfigError(f"there is no job file {self.job}; check --job")
        if not self.servers:
            raise ConfigError("no data server is given; add --servers HOST:PORT,..., addresses of `dataserver serve`")
        return self.job, self.servers


def load_config(path: Path) -> dict[str, Any]:
    """The values of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or holds something other than a mapping.
    """
    try:
        with path.open("rb") as file:
            data = parse_yaml(file.read(MAX_TEXT_BYTES + 1))
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except TextError as error:
        raise ConfigError(f"the configuration {path} cannot be used: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {path} holds a {type(data).__name__}; a mapping of options is required")
    return data


def validate_config(data: dict[str, Any]) -> TrainConfig:
    """A configuration from parsed YAML; ConfigError names every field that is wrong."""
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def describe(error: ValidationError) -> str:
    """One line for all that pydantic found."""
    problems = [
        f"{'.'.join(str(part) for part in e['loc']) or 'options'}: {_problem(e['type'], e['msg'])}"
        for e in error.errors(include_url=False)
    ]
    return f"the configuration is not valid: {'; '.join(problems)}"


def _problem(kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        return "this option is unknown; `trainclient train --help` lists the options"
    return message.removeprefix("Value error, ")
