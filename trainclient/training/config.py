"""Configuration of a training run, from a YAML file, from flags, or both.

What is wrong with it is said before torch is loaded, which takes longer than all else that a refusal needs.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from pydantic import BeforeValidator, Field, ValidationError

from dataserver.job_files import read_values
from dataserver.security import Credentials
from dataserver.tracing import DEFAULT_EVERY, Tracing, TracingError
from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.models.contrastive_loss import ContrastiveLoss
from trainclient.stream.endpoint import Timeouts
from trainclient.training.config_base import SAYS_ITSELF, Options
from trainclient.training.model_config import BackboneModel, EncoderModel, GeneratorModel, NamedModel, WholeModel
from trainclient.training.optimizer_config import OptimizerConfig

if TYPE_CHECKING:
    import torch


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field."""


class RowsByHost(StrEnum):
    """When rows of pipelines move through the memory of hosts, and not from GPU to GPU by transfers that keep both."""

    NEVER = "never"
    """Rows never go through hosts."""
    FIRST = "first"
    """In the first step and the first of an evaluation, when GPUs are new to their work: they may load kernels only
    while nothing runs."""
    ALWAYS = "always"
    """In all steps: slow, for runs whose processes wait for each other otherwise."""

    def applies(self, *, first: bool) -> bool:
        """Whether they do in a step, which may be the first one."""
        return self is RowsByHost.ALWAYS or (self is RowsByHost.FIRST and first)


class ContrastiveConfig(Options):
    """Contrastive training of towers: the loss and its features."""

    loss: ContrastiveLoss = ContrastiveLoss.CLIP
    """Loss over all pairs of a contrastive batch: clip (softmax) or siglip (sigmoid)."""
    features: Annotated[int, Field(ge=1, le=2**24)] = 64
    """Width of the features of all towers."""


ResumeStep = Annotated[int, Field(ge=0, lt=10**18)]


def _resumable(given: Any) -> Any:
    """What `resume_from` may be, so that one line says it instead of one for each type."""
    is_step = isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 10**18
    if is_step or given in set(ResumeFrom):
        return given
    raise ValueError(
        f"{given!r} is given; a step, {', '.join(list(ResumeFrom)[:-1])} or {list(ResumeFrom)[-1]} is required"
    )


class CheckpointConfig(Options):
    """Where and how often checkpoints are saved, and which one a run resumes from."""

    directory: Annotated[Path | None, SAYS_ITSELF] = None
    """Folder for checkpoints, shared by all processes. Training resumes from the newest one in it, or as
    --resume-from says. Without a folder nothing is saved."""
    every: Annotated[int, Field(ge=1)] = 100
    """Steps between checkpoints; one more is written when training ends."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Number of checkpoints of this run to keep, the newest ones."""
    asynchronous: bool = True
    """Go on training while a checkpoint is written. Each process keeps host memory for a copy of what it saves."""


class TimelineConfig(Options):
    """Recording of single steps: when every process did what, beside the plan."""

    directory: Annotated[Path | None, SAYS_ITSELF] = None
    """Folder for a table and a trace (ui.perfetto.dev) of each recorded step; without one nothing is recorded."""
    first: Annotated[int, Field(ge=0)] = 2
    """First step to record; before it, a run is still warming up."""
    steps: Annotated[int, Field(ge=1)] = 1
    """How many steps to record. All processes wait for each other before each of them."""

    @property
    def recorded(self) -> range:
        """Steps whose operations are recorded."""
        return range(self.first, self.first + self.steps)


class ProfileConfig(Options):
    """Traces of some steps by torch's profiler."""

    directory: Annotated[Path | None, SAYS_ITSELF] = None
    """Folder for a trace of each process (ui.perfetto.dev); without one nothing is profiled."""
    first: Annotated[int, Field(ge=0)] = 2
    """First step to profile; before it, a run is still warming up."""
    steps: Annotated[int, Field(ge=1)] = 1
    """How many steps to profile. They are slower, and traces have about a megabyte for each thousand operations."""

    @property
    def profiled(self) -> range:
        """Steps that torch's profiler records."""
        return range(self.first, self.first + self.steps)


class EvaluationConfig(Options):
    """Evaluation on a held-out stream."""

    job: Annotated[Path | None, SAYS_ITSELF] = None
    """Job of the held-out stream, with the modules of the training job; without one nothing is evaluated."""
    every: Annotated[int, Field(ge=1)] = 500
    """Number of steps between two evaluations."""
    steps: Annotated[Annotated[int, Field(ge=1)] | None, SAYS_ITSELF] = None
    """Steps of the held-out stream to evaluate; by default all steps of its job."""


class Dtype(StrEnum):
    """Types of the parameters, of all activations, and of what moves between modules."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def torch(self) -> "torch.dtype":
        """The type of torch with this name."""
        import torch

        return {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}[self.value]


class OnNonfinite(StrEnum):
    """What to do after a step whose losses or gradients are not finite."""

    STOP = "stop"
    """End training, and say where it began."""
    SKIP = "skip"
    """Leave the parameters as they were, say the same, and go on with the next step."""


class Device(StrEnum):
    """Kind of device that computes."""

    AUTO = "auto"
    """The GPU of this process's LOCAL_RANK if there is one, otherwise the CPU."""
    CPU = "cpu"
    CUDA = "cuda"


REQUIRED = tyro.conf.arg(help_behavior_hint="(required)")


class TrainConfig(Options):
    """A training run: its job, servers, models, optimizer and outputs."""

    job: Annotated[Path | None, REQUIRED] = None
    """YAML or JSON file of the job."""
    servers: Annotated[str, REQUIRED] = ""
    """Data servers, as HOST:PORT,HOST:PORT; HOST:FIRST-LAST stands for a range of ports."""
    tls_ca: Annotated[Path | None, SAYS_ITSELF] = None
    """PEM file of the authorities that sign the servers' certificates. With it every connection to them is
    encrypted."""
    tls_cert: Annotated[Path | None, SAYS_ITSELF] = None
    """PEM file of a certificate to show servers that ask for one (their --client-ca)."""
    tls_key: Annotated[Path | None, SAYS_ITSELF] = None
    """PEM file of the private key of --tls-cert."""
    token_file: Annotated[Path | None, SAYS_ITSELF] = None
    """File with the token to show servers that ask for one. Needs --tls-ca, except for servers on this machine."""
    models: WholeModel = WholeModel.model_validate({})
    """A released model that encoder and backbone start from."""
    encoder: EncoderModel = EncoderModel()
    """Sizes of the encoder, and of image towers."""
    backbone: BackboneModel = BackboneModel()
    """Sizes of the backbone, and of text towers."""
    generator: GeneratorModel = GeneratorModel()
    """Sizes of the job's generators."""
    modules: Annotated[dict[str, NamedModel], tyro.conf.Suppress] = Field(default_factory=dict)
    """Settings by module name, for modules that differ from others of their kind; only in a configuration file."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How the optimizer updates the parameters."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Where and how often checkpoints are saved."""
    timeline: TimelineConfig = TimelineConfig()
    """Which steps are recorded beside their plans."""
    profile: ProfileConfig = ProfileConfig()
    """Traces of some steps by torch's profiler."""
    contrastive: ContrastiveConfig = ContrastiveConfig()
    """How towers are trained against each other."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on a held-out stream."""
    text_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the text loss."""
    image_weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of the generator's loss."""
    dtype: Dtype = Dtype.FLOAT32
    """Type of parameters and activations. With bfloat16 the optimizer keeps float32 copies of the parameters."""
    compile: bool = False
    """Compile the blocks of built-in modules with torch.compile when they first run."""
    device: Device = Device.AUTO
    """Kind of device that computes."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial parameters; the data uses the job's seed."""
    resume_from: Annotated[ResumeStep | ResumeFrom, BeforeValidator(_resumable)] = ResumeFrom.NEWEST
    """Checkpoint to resume from: a step (100), newest, newest-whole (skips damaged ones with a warning), or none
    (start from scratch; refuses a folder that has checkpoints)."""
    take_over: bool = False
    """Take over the outputs from another run that owns them, even if it may still be alive; it then ends."""
    steps: Annotated[Annotated[int, Field(ge=1)] | None, SAYS_ITSELF] = None
    """Stop before this step, unless the job ends earlier."""
    max_invalid_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Stop training when more than this share of all images so far could not be decoded. As long as there are fewer
    than a thousand images, the share is of one thousand."""
    on_nonfinite: OnNonfinite = OnNonfinite.STOP
    """After a step whose losses or gradients are not finite: stop, or skip its update on all processes."""
    metrics: Annotated[Path | None, SAYS_ITSELF] = None
    """Write one JSON line per step to this file; a resumed run replaces the lines of steps that it repeats."""
    tensorboard: Annotated[Path | None, SAYS_ITSELF] = None
    """Write TensorBoard events to this folder; needs the package tensorboard."""
    wandb: Annotated[str | None, SAYS_ITSELF] = None
    """Send metrics to this project of Weights & Biases; needs the package wandb."""
    otlp_endpoint: Annotated[str | None, SAYS_ITSELF] = None
    """Send traces of some steps to this collector of OpenTelemetry (OTLP over gRPC): http://HOST:PORT, or https://HOST:PORT
    with TLS. Data servers with an --otlp-endpoint add what they do for these steps."""
    otlp_insecure: bool = False
    """Send traces to a collector on another machine without encryption, over a network that you trust."""
    trace_every: Annotated[int, Field(ge=1, lt=10**10)] = DEFAULT_EVERY
    """Trace steps 0, N, 2N, ..."""
    peak_tflops: Annotated[Annotated[float, Field(gt=0)] | None, SAYS_ITSELF] = None
    """Peak of one device in 10^12 operations per second, for the MFU in the metrics; by default that of known GPUs."""
    progress: bool = True
    """Show on a terminal what will train, then a line per step, and at the end where the time went."""
    threads: Annotated[Annotated[int, Field(ge=1)] | None, SAYS_ITSELF] = None
    """CPU threads of each process; by default one with a GPU, otherwise its share of the machine's cores."""
    timeout_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """Seconds to wait for another process before training fails."""
    rows_by_host: RowsByHost = RowsByHost.FIRST
    """When the rows of a pipeline on GPUs go through host memory: never; first (in the first step, and the first one of
    an evaluation, because GPUs may load kernels only while no transfer runs); or always, which is slow."""
    first_answer_s: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """Seconds to wait for the first answer of a data server: trainers may start before their servers."""
    stop_grace_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Seconds to finish the current step and save it after Ctrl-C or SIGTERM. Under torchrun, give its
    --shutdown-timeout more than that: by default it kills processes after 30 s, before torch 2.12 always."""

    @property
    def timeouts(self) -> Timeouts:
        """Deadlines of all calls to data servers."""
        return Timeouts(first_answer=self.first_answer_s)

    @property
    def credentials(self) -> Credentials:
        """What data servers are known by, and what they are shown; SecurityError where it does not go together."""
        return Credentials(self.tls_ca, self.tls_cert, self.tls_key, self.token_file)

    @property
    def tracing(self) -> Tracing | None:
        """Which steps are traced, and where to; TracingError where they cannot go there."""
        if self.otlp_endpoint is None:
            return None
        return Tracing(self.otlp_endpoint, self.trace_every, self.otlp_insecure)

    def require_inputs(self) -> tuple[Path, str]:
        """The job file and the servers; ConfigError if one is missing."""
        if self.job is None:
            raise ConfigError("no job is given; add --job JOB.yaml, the specification that the data servers plan")
        if self.job.is_fifo():
            raise ConfigError(
                f"the job {self.job} is a pipe, and several processes read the job; write it to a file, and give that "
                "as --job"
            )
        if not self.job.is_file():
            raise ConfigError(f"there is no job file {self.job}; check --job")
        if not self.servers:
            raise ConfigError("no data server is given; add --servers HOST:PORT,..., addresses of `dataserver serve`")
        return self.job, self.servers


Config = TypeVar("Config", bound=TrainConfig)


def load_config(path: Path) -> dict[str, Any]:
    """The values of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or holds something other than a mapping.
    """
    data = read_values("the configuration", path, ConfigError)
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {path} holds a {type(data).__name__}; a mapping of options is required")
    return data


def validate_config(data: dict[str, Any]) -> TrainConfig:
    """A configuration from parsed YAML; ConfigError names every field that is wrong."""
    return validated(data, TrainConfig)


def validated(data: dict[str, Any], kind: type[Config]) -> Config:
    """`validate_config` for a command that has further options."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None


def checked(config: Config) -> Config:
    """A configuration whose file and flags are put together; ConfigError names fields that do not fit each other."""
    problems = [f"optimizer.{problem}" for problem in config.optimizer.problems()]
    if config.resume_from not in (ResumeFrom.NEWEST, ResumeFrom.NONE) and config.checkpoint.directory is None:
        problems.append(f"resume_from: {config.resume_from} needs checkpoint.directory, the folder to resume from")
    try:
        if config.tracing is not None:
            _ = config.tracing.recorder
    except TracingError as error:
        problems.append(f"otlp_endpoint: {error}")
    if problems:
        raise ConfigError(f"the configuration is not valid: {'; '.join(problems)}")
    return config


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
