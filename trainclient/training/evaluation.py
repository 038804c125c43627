"""Losses on a held-out stream, by the modules that are being trained; of towers also the recall of retrieval.

A held-out stream comes with a job of its own, whose modules lie on the processes as those of the training job do. All
of them count as frozen: the layout's own function then gives programs of forwards alone, and servers plan for these.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.identity import Job, JobSpecError, identify
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.modules import Site, TrainedModule
from trainclient.program.assembly import assemble
from trainclient.program.clock import Stopwatch
from trainclient.program.interpreter import StepRecord
from trainclient.program.runner import LossWeights
from trainclient.program.step_programs import StreamError
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import resolve_job
from trainclient.topology.process_grid import GridProcess, Topology
from trainclient.topology.process_groups import Groups
from trainclient.training import garbage
from trainclient.training.config import ConfigError, TrainConfig
from trainclient.training.metrics import (
    Contribution,
    EvaluationMetrics,
    Totals,
    contrastive_pairs,
    digest_text,
    mean,
    reduce_contribution,
)
from trainclient.training.models import Models
from trainclient.training.retrieval import Retrieval, recall, require_comparable
from trainclient.training.sharded_parameters import ShardedParameters
from trainclient.training.streams import Streams

GRID_FIELDS: Final = ("name", "kind", "dp", "tp", "pp", "sp")
"""Fields of a module that say which processes hold it."""


def held_out_job(config: TrainConfig, file: Path, fleet: Fleet, training: Job) -> Job:
    """The job of an evaluation, as its servers get it: complete, and with forwards alone.

    Args:
        config: of the run.
        file: the job as the user wrote it.
        fleet: the servers.
        training: the job that is trained, complete.

    Raises:
        ValueError: it cannot be read, is not valid, or has other modules or models than the training job.
        ClientError: no server could be reached, or they refuse the job.
    """
    try:
        job = resolve_job(file, fleet)
    except JobSpecError as error:
        raise JobSpecError(f"evaluation.job {file}: {error}") from None
    for what, here, there in _grid_fields(job, training):
        if here != there:
            raise JobSpecError(
                f"the job {file} of the evaluation has {what} {here}, the training job {there}; both run on the same "
                "processes, so give it the same"
            )
    _require_same_models(config, file, job, training)
    return identify(job.spec.forward_only)


def _grid_fields(job: Job, training: Job) -> Iterator[tuple[str, object, object]]:
    """What must be the same for modules to lie on the same processes: its name, here and there."""
    ours, theirs = job.spec.execution, training.spec.execution
    yield "modules", [m.name for m in ours.modules], [m.name for m in theirs.modules]
    for here, there in zip(ours.modules, theirs.modules, strict=True):
        for field in GRID_FIELDS:
            yield f"module {here.name} with {field}", _shown(here, field), _shown(there, field)
    yield "layout.kind", ours.layout.kind, theirs.layout.kind
    yield "chunks", ours.layout.num_chunks, theirs.layout.num_chunks
    yield "groups of degrees", ours.layout.group_degrees, theirs.layout.group_degrees


def _shown(module: ModuleSpec, field: str) -> str:
    return str(getattr(module, field))


def _require_same_models(config: TrainConfig, file: Path, held_out: Job, training: Job) -> None:
    """Raise ConfigError unless the models of a training job fit the held-out stream."""
    ours, theirs = (Models.of(config, job.spec).describe() for job in (held_out, training))
    different = [
        f"{name}.{key}: {value!r} there, {theirs[name][key]!r} in training"
        for name, sizes in ours.items()
        for key, value in sizes.items()
        if value != theirs[name][key]
    ]
    if different:
        raise ConfigError(
            f"the job {file} of the evaluation needs other models than are trained ({'; '.join(different)}); "
            "give its stream the same tokenizer, sizing and generation"
        )


@dataclass(slots=True)
class _Sums:
    """Sums over all steps so far."""

    text_loss: float = 0.0
    image_loss: float = 0.0
    contrastive_loss: float = 0.0
    text_tokens: int = 0
    target_patches: int = 0
    pairs: int = 0
    samples: int = 0
    sample_digest: int = 0
    images: int = 0
    invalid_images: int = 0

    def add(self, record: StepRecord, totals: Totals, pairs: int) -> None:
        """Add a step, with its planned targets, which any process sees."""
        self.pairs += pairs
        text, image, contrastive = totals.loss_sums
        self.contrastive_loss += contrastive
        self.text_tokens += record.text_tokens
        self.target_patches += record.target_patches
        self.text_loss += text
        self.image_loss += image
        self.samples += totals.samples
        self.sample_digest += totals.sample_digest
        self.images += totals.images
        self.invalid_images += totals.invalid_images

    def metrics(self, seconds: float, recall: dict[str, float] | None) -> EvaluationMetrics:
        """Means over all targets of all steps."""
        return EvaluationMetrics(
            text_loss=mean(self.text_loss, self.text_tokens),
            image_loss=mean(self.image_loss, self.target_patches),
            samples=self.samples,
            sample_digest=digest_text(self.sample_digest),
            images=self.images,
            invalid_images=self.invalid_images,
            seconds=seconds,
            contrastive_loss=mean(self.contrastive_loss, self.pairs),
            recall=recall,
        )


class Evaluation:
    """One process's part in evaluating; all processes of the run do so together."""

    def __init__(
        self,
        held_out: Job,
        modules: Sequence[tuple[Site, TrainedModule]],
        parameters: ShardedParameters,
        groups: Groups,
        config: TrainConfig,
    ) -> None:
        """Evaluate modules as they are when `run` is called.

        Args:
            held_out: of `held_out_job`.
            modules: of this process, as they are trained.
            parameters: their parameters.
            groups: this process and the others.
            config: of the run.
        """
        topology = Topology.of(held_out.spec)
        self._process = topology.processes[groups.rank]
        sites = [
            (replace(site, job=held_out.spec, module=chunk.module), module)
            for chunk, (site, module) in zip(self._process.chunks, modules, strict=True)
        ]
        clock = Stopwatch(groups.device)
        self._retrieval = _retrieval(held_out, self._process)
        self._machine = assemble(
            held_out.spec,
            topology,
            self._process,
            sites,
            groups.communicators,
            LossWeights(),
            clock,
            None if self._retrieval is None else self._retrieval.add,
            parameters,
        )
        self._held_out, self._is_new = held_out, True
        self._networks = [module.network for _, module in modules]
        self._groups = groups
        self._config = config

    def run(self, stop: Callable[[], bool]) -> EvaluationMetrics | None:
        """The losses over the held-out steps; None if a process was asked to stop before their end.

        Nothing that training depends on changes. The result depends on the weights alone: modules are in eval mode,
        noise is keyed by the sample, and what a module of one's own draws is seeded.

        Args:
            stop: whether this process was asked to.
        """
        sums, begun = _Sums(), time.perf_counter()
        with (
            undisturbed(self._networks, self._groups.device, self._config.seed),
            Streams.open(
                self._config.servers,
                self._held_out,
                self._process,
                self._machine.tensors,
                timeouts=self._config.timeouts,
                credentials=self._config.credentials,
                pin_memory=self._groups.device.type == "cuda",
            ) as streams,
        ):
            batches = streams.batches(self._groups)
            for _ in range(evaluated_steps(self._config, self._held_out, streams.num_steps)):
                by_host = self._config.rows_by_host.applies(first=self._is_new)
                with self._groups.host_staging.through_hosts(wanted=by_host):
                    record = self._machine.interpreter.run(batches)
                self._is_new = False
                if record is None:
                    raise StreamError("the held-out stream ended before the last step of its job")
                own = Contribution.of(self._machine, self._process, record, stop=stop())
                with translate_rank_errors("other ranks"):
                    totals = reduce_contribution(own, self._groups)
                if totals.stop:
                    return None
                sums.add(record, totals, contrastive_pairs(self._held_out))
                garbage.collect_young()
            found = self._recall()
        return sums.metrics(time.perf_counter() - begun, found)

    def _recall(self) -> dict[str, float] | None:
        """Recall over the samples of all processes; None where there are no towers."""
        if self._retrieval is None:
            return None
        counts = self._retrieval.counts().to(self._groups.device)
        with translate_rank_errors("other ranks"):
            dist.all_reduce(counts, group=self._groups.world)
        return recall(self._retrieval, counts)


def evaluated_steps(config: TrainConfig, held_out: Job, num_steps: int) -> int:
    """How many steps of a held-out job are evaluated; ValueError if those are too many samples to be compared.

    Its stream has to be one that continues no other.
    """
    if held_out.stream.continues is not None:
        raise ValueError("the held-out job continues another stream; leave its stream.continues out")
    steps = min(num_steps, config.evaluation.steps or num_steps)
    require_comparable(steps * contrastive_pairs(held_out))
    return steps


def _retrieval(held_out: Job, process: GridProcess) -> Retrieval | None:
    """What compares the features of towers; those of a last stage ask."""
    if not contrastive_pairs(held_out):
        return None
    last = process.chunks[-1]
    asks = last.is_last and process.tp == 0
    return Retrieval([m.name for m in held_out.spec.execution.modules], last.module.name if asks else None)


@contextmanager
def undisturbed(networks: Sequence[nn.Module], device: torch.device, seed: int) -> Iterator[None]:
    """Run networks in eval mode, on random numbers of their own; afterwards all is as it was."""
    modes = {module: module.training for network in networks for module in network.modules()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for module in modes:
            module.training = False
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
