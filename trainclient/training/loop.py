"""The training loop of one process."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataserver.planning.identity import Job
from dataserver.planning.jobspec import ModuleKind
from trainclient.client import Batch, DataClient
from trainclient.models.parameters import fill_missing_gradients
from trainclient.parallel.assembly import build_executor, build_role
from trainclient.parallel.executor import StepRecord
from trainclient.parallel.gradients import reduce_gradients, scale_gradients, square_sum
from trainclient.parallel.groups import Groups
from trainclient.parallel.roles import LossWeights
from trainclient.parallel.topology import Topology
from trainclient.parallel.transport import contact
from trainclient.training.checkpoint import Checkpoints, TrainerState, read_state
from trainclient.training.config import TrainConfig
from trainclient.training.metrics import (
    Contribution,
    MetricsWriter,
    StepMetrics,
    Totals,
    reduce_contribution,
    sample_hash,
)
from trainclient.training.modules import ModelConfigs, build_module
from trainclient.training.optimizer import Optimizer
from trainclient.training.reporter import StepReporter
from trainclient.training.signals import StopSignals

FEWEST_IMAGES = 1000
"""A share of invalid images is judged as if of at least this many, or one early bad image would end a run."""


class TrainingError(RuntimeError):
    """Training cannot go on. All processes raise it in the same step with the same message."""


def continue_from(path: Path, client: DataClient, sizes: dict[str, Any]) -> TrainerState:
    """Set a client to where a checkpoint ended.

    Args:
        path: the checkpoint.
        client: of any view of the job.
        sizes: of every module (`ModelConfigs.describe_all`).

    Raises:
        StateError: the checkpoint belongs to another stream.
        CheckpointError: it belongs to other models, or cannot be read.
    """
    state = read_state(path)
    client.load_state_dict(state.cursor)
    state.require_modules(sizes, path)
    return state


class Trainer:
    """One process of a run: its module, its optimizer, and its part of every step."""

    def __init__(self, config: TrainConfig, job: Job, topology: Topology, groups: Groups) -> None:
        """Build this process's module; all processes do so together."""
        configs = ModelConfigs.of(config, job.spec)
        weights = LossWeights(config.text_weight, config.image_weight)
        self._config = config
        self._groups = groups
        self._module = build_module(configs, groups.place, config, groups.device)
        self._optimizer = Optimizer(self._module, config.optimizer)
        self._role = build_role(job.spec, topology, groups, self._module, weights)
        self._executor = build_executor(job.spec, topology, groups, self._role)
        self._sizes = configs.describe_all(job.spec)
        self._images = self._invalid_images = 0
        self._lap_start = time.perf_counter()
        self._checkpoints: Checkpoints | None = None
        if config.checkpoint.directory is not None:
            self._checkpoints = Checkpoints(config.checkpoint.directory, config.checkpoint.keep, groups.control)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that this process reads."""
        return self._role.tensors

    def resume(self, client: DataClient) -> None:
        """Continue from the newest checkpoint, if there is one; errors as in `continue_from`."""
        path = self._checkpoints.latest() if self._checkpoints is not None else None
        if path is None or self._checkpoints is None:
            return
        state = continue_from(path, client, self._sizes)
        self._checkpoints.load(path, self._optimizer.tensors(self._groups.place.module.name))
        self._optimizer.publish()
        self._images, self._invalid_images = state.images, state.invalid_images

    def run(self, client: DataClient, stop: StopSignals, writer: MetricsWriter) -> None:
        """Train until the job or the configured steps end, or a signal comes; save at the end.

        Raises:
            TrainingError: too many invalid images, or gradients that are not finite.
        """
        end = min(client.num_steps, self._config.steps or client.num_steps)
        saved, stopping = client.step, False
        batches = iter(client)
        self._lap()
        with StepReporter(client, self._groups.place.stage) as reporter:
            while client.step < end and not stopping:
                stopping = self._step(batches, stop, writer, reporter)
                if client.step % self._config.checkpoint.every == 0:
                    saved = self._save(client)
                    self._lap()
        if client.step != saved:
            self._save(client)

    def _step(self, batches: Iterator[Batch], stop: StopSignals, writer: MetricsWriter, reporter: StepReporter) -> bool:
        """One update. Returns whether any process was asked to stop."""
        record = self._executor.run(batches)
        if record is None:
            raise TrainingError("the stream ended before the last step of the job; the servers planned another job")
        fill_missing_gradients(self._module)
        with contact("other ranks"):
            reduce_gradients(self._module, self._groups.data_parallel)
            seconds = self._lap()
            totals = reduce_contribution(self._contribution(record, seconds, stop.requested), self._groups)
        self._count_images(record, totals)
        norm = math.sqrt(totals.gradient_square_sum)
        self._update(record.step, norm)
        writer.write(_metrics(record, totals, norm))
        reporter.report(
            record, seconds, self._role.forward_times.nanoseconds(), self._role.backward_times.nanoseconds()
        )
        return totals.stop

    def _lap(self) -> float:
        """Seconds since the last call: a step with the optimizer's part of the one before, without checkpoints."""
        started, self._lap_start = self._lap_start, time.perf_counter()
        return self._lap_start - started

    def _contribution(self, record: StepRecord, seconds: float, stop: bool) -> Contribution:
        place, loss = self._groups.place, float(self._role.loss_sum)
        is_backbone = place.module.kind is ModuleKind.BACKBONE
        names_samples = is_backbone and place.is_first_stage
        return Contribution(
            text_loss_sum=loss if is_backbone else 0.0,
            image_loss_sum=0.0 if is_backbone else loss,
            gradient_square_sum=float(square_sum(self._module)) if place.rank == 0 else 0.0,
            samples=record.num_items if names_samples else 0,
            sample_digest=sample_hash(record.samples) if names_samples else 0,
            images=0 if is_backbone else record.num_items,
            invalid_images=0 if is_backbone else record.num_invalid,
            stop=stop,
            wait_s=record.data_wait_s,
            seconds=seconds,
        )

    def _count_images(self, record: StepRecord, totals: Totals) -> None:
        self._images += totals.images
        self._invalid_images += totals.invalid_images
        limit = self._config.max_invalid_ratio
        if self._invalid_images > limit * max(self._images, FEWEST_IMAGES):
            raise TrainingError(
                f"{self._invalid_images} of {self._images} images up to step {record.step} could not be decoded, more "
                f"than max_invalid_ratio {limit:g} allows; run `dataserver lint PATH --decode` and leave them out with "
                "its quarantine list, or raise the limit"
            )

    def _update(self, step: int, norm: float) -> None:
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradients of step {step} are not finite; resume from a checkpoint with a lower optimizer.lr or "
                "optimizer.clip"
            )
        clip = self._config.optimizer.clip
        if 0 < clip < norm:
            scale_gradients(self._module, clip / norm)
        self._optimizer.step(step)

    def _save(self, client: DataClient) -> int:
        """Write a checkpoint if there is a place for it; returns the first step that is not in it."""
        if self._checkpoints is not None:
            state = TrainerState(client.state_dict(), self._sizes, self._images, self._invalid_images)
            with contact("other ranks"):
                self._checkpoints.save(self._optimizer.tensors(self._groups.place.module.name), state)
        return client.step


def _metrics(record: StepRecord, totals: Totals, norm: float) -> StepMetrics:
    return StepMetrics(
        step=record.step,
        text_loss=totals.text_loss_sum / record.text_tokens if record.text_tokens else None,
        image_loss=totals.image_loss_sum / record.target_patches if record.target_patches else None,
        grad_norm=norm,
        samples=totals.samples,
        sample_digest=f"{totals.sample_digest:016x}",
        images=totals.images,
        invalid_images=totals.invalid_images,
        seconds=totals.seconds,
        data_wait_percent=100 * totals.wait_ratio,
    )
