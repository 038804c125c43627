"""The training loop of one process."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Final

from torch import Tensor

from dataserver.planning.job.identity import Job
from trainclient.checkpoint.state import TrainerState, module_of
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.exchange.view_broadcast import Batches
from trainclient.program.assembly import assemble
from trainclient.program.clock import Stopwatch
from trainclient.program.runner import LossWeights
from trainclient.run_times.gathering import report_run
from trainclient.run_times.spent import Part, RunTimes
from trainclient.stream.continuing import stream_changes
from trainclient.timeline.recorder import TimelineRecorder
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import Groups
from trainclient.training import garbage
from trainclient.training.changed_settings import changes, update_settings, used_rates
from trainclient.training.config import OnNonfinite, TrainConfig
from trainclient.training.errors import TrainingError
from trainclient.training.evaluation import Evaluation
from trainclient.training.invalid_images import InvalidImages
from trainclient.training.metrics import (
    Contribution,
    EvaluationMetrics,
    StepMetrics,
    contrastive_pairs,
    reduce_contribution,
)
from trainclient.training.models import Models
from trainclient.training.nonfinite_report import explain
from trainclient.training.optimizer import Optimizer
from trainclient.training.output_leases import Leases
from trainclient.training.peak_flops import peak_flops
from trainclient.training.profiling import StepProfiler
from trainclient.training.run_name import digest_settings, name_run
from trainclient.training.saving import Saving
from trainclient.training.schedule import ModuleRates, module_rates, parameter_rates
from trainclient.training.sharded_parameters import shard_parameters
from trainclient.training.signals import StopSignals
from trainclient.training.sinks import MetricsWriter
from trainclient.training.step_reporter import StepReporter, open_reporters
from trainclient.training.streams import Streams
from trainclient.training.tied_heads import TiedHeads

DEGREES = ("dp", "tp", "pp", "sp")
"""Fields of a module in a job that say how many processes run it."""
NO_LEASES: Final = Leases()
"""Those of a run that owns nothing."""


class Trainer:
    """One process of a run: its modules, their optimizer, and its part of every step."""

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        topology: Topology,
        groups: Groups,
        held_out: Job | None = None,
        leases: Leases = NO_LEASES,
    ) -> None:
        """Build this process's modules; all processes do so together.

        Args:
            config: of the run.
            job: what is trained.
            topology: of the job.
            groups: this process and the others.
            held_out: what is evaluated, if anything.
            leases: of the run's outputs.
        """
        models = Models.of(config, job.spec)
        modules = models.build(groups.process, groups.device)
        self._config = config
        self._groups = groups
        self._parameters = shard_parameters(modules, models.shardings(groups.process), groups)
        self._tied = TiedHeads(models, topology, groups, config.timeout_s)
        self._parameters.leave_to_others(self._tied.copies)
        self._rates = module_rates(config.optimizer, job.spec.execution.modules)
        rates = dict[str, ModuleRates]()
        for site, module in modules:
            rates |= parameter_rates(self._rates, site.module.name, module.network)
        self._optimizer = Optimizer(self._parameters.local, config.optimizer, rates)
        self._clock = Stopwatch(groups.device, groups.waits)
        peak = peak_flops(config.peak_tflops, groups.device)
        self._peak_flops = None if peak is None else peak * groups.world.size()
        weights = LossWeights(config.text_weight, config.image_weight)
        self._machine = assemble(
            job.spec,
            topology,
            groups.process,
            modules,
            groups.communicators,
            weights,
            self._clock,
            parameters=self._parameters,
        )
        self._stream, self._pairs = job.stream, contrastive_pairs(job)
        self._sizes = models.describe()
        self._frozen = models.frozen()
        self._updates = update_settings(config.optimizer, self._rates)
        self._degrees = {m.name: {d: getattr(m, d) for d in DEGREES} for m in job.spec.execution.modules}
        self._settings = digest_settings(config, job)
        self.run_name = name_run(config, job)
        """Name of the run that this process is part of, from its first step on."""
        self._images = InvalidImages(config.max_invalid_ratio)
        self._times = RunTimes(topology, groups.process)
        self._phase, self._is_new = "prepares", True
        recorded = config.timeline.directory, config.timeline.recorded
        self._timeline = TimelineRecorder(*recorded, topology, groups, job.stream, leases.own.get("timeline"))
        self._profile_lease = leases.profile
        self._saving = Saving(config.checkpoint, groups, leases.own.get("checkpoint"))
        self._evaluation = None if held_out is None else Evaluation(held_out, modules, self._parameters, groups, config)
        self._unevaluated: StepMetrics | None = None

    @property
    def doing(self) -> str:
        """What this process does at the moment, in words; another thread may ask."""
        return self._phase or self._machine.interpreter.doing

    @property
    def tensors(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors that this process reads, by module."""
        return self._machine.tensors

    @property
    def owes_evaluation(self) -> bool:
        """Whether the metrics of the step before come once more, with the evaluation that they lack."""
        return self._unevaluated is not None

    def resume(self, streams: Streams) -> None:
        """Continue from the checkpoint that the configuration names, if there is one; errors as in `Saving.resume`."""
        state = self._saving.resume(streams, self._sizes, self._tensors(), self._config.resume_from, self._settings)
        if state is None:
            return
        self._optimizer.publish()
        self._images.images, self._images.invalid = state.images, state.invalid_images
        self.run_name = state.run or self.run_name
        if self._groups.rank == 0:
            for line in (*stream_changes(streams.job, state.cursor), *changes(state, self._updates, self._frozen)):
                sys.stderr.write(f"changed on resume: {line}\n")
        if self._evaluation is not None and state.unevaluated is not None:
            self._unevaluated = StepMetrics(**state.unevaluated)

    def run(self, streams: Streams, stop: StopSignals, writer: MetricsWriter) -> None:
        """Train until the job or the configured steps end, or a signal comes; save at the end.

        Raises:
            TrainingError: too many invalid images, or gradients that are not finite.
            SaveError: a checkpoint cannot be written.
        """
        end = min(streams.num_steps, self._config.steps or streams.num_steps)
        saved = first = streams.step
        batches = streams.batches(self._groups)
        self._times.until_now(Part.START)
        with self._saving.completed(), garbage.collected_between_steps(), ExitStack() as entered:
            reporters = open_reporters(streams, self._groups.process, entered)
            profiler = entered.enter_context(StepProfiler(self._config.profile, self._groups, self._profile_lease))
            stopping = self._make_up(streams, stop, writer)
            while streams.step < end and not stopping:
                profiler.begin_step(streams.step)
                stopping = self._step(streams, batches, stop, writer, reporters)
                garbage.collect(streams.step - first)
                if streams.step % self._config.checkpoint.every == 0:
                    saved = self._save(streams, writer)
            if streams.step != saved:
                self._save(streams, writer)
            self._phase = "waits for the last checkpoint"
        self._times.until_now(Part.CHECKPOINTS)
        self._phase, steps = "brings together the times of the run", range(first, streams.step)
        if (report := report_run(self._times, self._config, self._groups, streams.first, steps)) is not None:
            writer.finish(report)

    def _step(
        self,
        streams: Streams,
        batches: Sequence[Batches],
        stop: StopSignals,
        writer: MetricsWriter,
        reporters: Sequence[StepReporter],
    ) -> bool:
        """One update. Returns whether any process was asked to stop."""
        self._phase, recorded = "begins a step", self._timeline.records(streams.step)
        if recorded:
            self._timeline.begin()
        self._times.until_now(Part.UPDATE)
        self._phase = ""
        with self._groups.host_staging.through_hosts(wanted=self._config.rows_by_host.applies(first=self._is_new)):
            record = self._machine.interpreter.run(batches)
        self._is_new = False
        if record is None:
            raise TrainingError("the stream ended before the last step of the job; the servers planned another job")
        self._phase = f"sums and updates of step {record.step}"
        gradients = self._parameters.gradients
        with translate_rank_errors("other ranks"):
            seconds = self._times.lap_s()
            self._tied.sum(gradients)
            own = Contribution.of(
                self._machine,
                self._groups.process,
                record,
                squares=self._parameters.square_sum(self._groups.device),
                seconds=seconds,
                stop=stop.requested,
                save_failed=self._saving.failed,
            )
            totals = reduce_contribution(own, self._groups)
        if totals.save_failed:
            self._saving.wait()
        self._images.add(record.step, totals.images, totals.invalid_images)
        self._optimizer.step(record.step, gradients, totals.norm, totals.finite)  # told before it is waited for
        finite, norm = all(map(math.isfinite, totals.sums.values)), math.sqrt(totals.sums.values[3])
        self._times.step(record, self._clock, self._machine, totals)
        if not finite:
            self._skip(record.step, gradients)
        self._parameters.drop()
        rates = {name: self._rates[name].lr(record.step) for name in used_rates(self._rates, self._frozen)}
        due = self._is_evaluated(record.step)
        held_out = self._evaluate(record.step, stop) if due and not totals.stop else None
        metrics = StepMetrics.of(
            record, totals, norm, rates, self._peak_flops, pairs=self._pairs, skipped=not finite, evaluation=held_out
        )
        writer.write(metrics)
        self._unevaluated = metrics if due and held_out is None else None
        for reporter in reporters:
            reporter.report(record, seconds, self._clock)
        self._times.end_step()
        if recorded:
            self._timeline.end(record, self._clock, streams.first)
            self._times.until_now(Part.OTHER)
        return totals.stop or (due and held_out is None)

    def _is_evaluated(self, step: int) -> bool:
        return self._evaluation is not None and (step + 1) % self._config.evaluation.every == 0

    def _evaluate(self, step: int, stop: StopSignals) -> EvaluationMetrics | None:
        """What the modules make of the held-out stream, in seconds that are no part of any step's; None if stopped."""
        if self._evaluation is None:
            return None
        self._phase = f"evaluates after step {step}"
        self._times.until_now(Part.UPDATE)
        found = self._evaluation.run(lambda: stop.requested)
        self._times.until_now(Part.EVALUATION)
        return found

    def _make_up(self, streams: Streams, stop: StopSignals, writer: MetricsWriter) -> bool:
        """Evaluate after the step before, if its metrics lack that. Returns whether any process was asked to stop."""
        metrics = self._unevaluated
        if metrics is None:
            return False
        held_out = self._evaluate(metrics.step, stop)
        writer.write(replace(metrics, evaluation=held_out))
        if held_out is not None:
            self._unevaluated = None
            writer.sync()
            self._saving.amend(self._state(streams))
        return held_out is None

    def _skip(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Go on without an update, as all processes do, for all know the same sums; or raise TrainingError."""
        bad = dict.fromkeys(module_of(name) for name, g in gradients.items() if not bool(g.isfinite().all()))
        with translate_rank_errors("other ranks"):
            where = explain(step, self._machine.runners, list(bad), self._stream, self._groups)
        if self._config.on_nonfinite is OnNonfinite.STOP:
            raise TrainingError(
                f"{where}; resume from a checkpoint with a lower optimizer.lr or optimizer.clip, leave out samples "
                "that are to blame with a quarantine list, or set on_nonfinite to skip"
            )
        if self._groups.rank == 0:
            sys.stderr.write(f"skipped: {where}\n")

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and the optimizer's state as parts of what a checkpoint holds."""
        stored = self._parameters.stored
        return {key: stored(key.partition("/")[0], tensor) for key, tensor in self._optimizer.tensors().items()}

    def _save(self, streams: Streams, writer: MetricsWriter) -> int:
        """Write or begin a checkpoint, if there is a place for it; returns the first step that is not in it."""
        self._phase = f"saves the checkpoint of step {streams.step}"
        writer.sync()
        tensors = {n: t for n, t in self._tensors().items() if n.partition("/")[0] not in self._tied.copies}
        self._saving.save(tensors, self._state(streams))
        self._times.until_now(Part.CHECKPOINTS)
        return streams.step

    def _state(self, streams: Streams) -> TrainerState:
        """What a checkpoint holds besides tensors."""
        counts = self._images.images, self._images.invalid
        owed = None if self._unevaluated is None else asdict(self._unevaluated)
        return TrainerState(
            streams.state_dict(),
            self._sizes,
            *counts,
            run=self.run_name,
            frozen=self._frozen,
            unevaluated=owed,
            optimizer=self._updates,
            degrees=self._degrees,
        )
