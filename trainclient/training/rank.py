"""One process of a run, from torchrun's environment to the end of training."""

import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
from rich.console import Console
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from dataserver.allocator import cache_freed_memory
from dataserver.planning.job.identity import Job
from trainclient.checkpoint.folder import stored_tensors
from trainclient.checkpoint.lease import FollowedLease
from trainclient.checkpoint.lease_file import LeaseError
from trainclient.checkpoint.owner import Owner
from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.selection import Stored, resumption, survey
from trainclient.checkpoint.state import OTHERWISE, CheckpointError
from trainclient.checkpoint.sums import seen_damage
from trainclient.client import DataClient
from trainclient.exchange.lost_ranks import translate_rank_errors, translate_torch_rank_errors
from trainclient.models.compiling import require_compiler
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import process_groups
from trainclient.training.attempt_rendezvous import join_attempt
from trainclient.training.config import ConfigError, Device, TrainConfig
from trainclient.training.control_channel import Control, RunEndedError
from trainclient.training.evaluation import evaluated_steps
from trainclient.training.jobs import Jobs, prepare
from trainclient.training.loop import Trainer
from trainclient.training.models import Models, weight_notes
from trainclient.training.output_leases import Leases, outputs, owned, owner_named, require_unowned
from trainclient.training.overview import overview
from trainclient.training.run_name import digest_settings, name_run
from trainclient.training.saving import continue_from, require_new
from trainclient.training.schedule import module_rates
from trainclient.training.signals import StopSignals
from trainclient.training.sinks import (
    JsonLines,
    MetricsWriter,
    Screen,
    Sink,
    TensorBoard,
    WeightsAndBiases,
    bytes_before,
    require_tensorboard,
    require_wandb,
)
from trainclient.training.streams import Streams
from trainclient.training.tied_heads import tied_pairs

_log = logging.getLogger(__name__)

JOBS_KEY: Final = "disttrain/jobs"
"""Key of the complete jobs, as a JSON list of canonical ones, in the store of all processes."""


OWNED_KEY: Final = "disttrain/owned"
"""Key of whether the run may write its outputs, as JSON: `refused` says why not, `profile` numbers that lease."""
LAUNCH_KEY: Final = "disttrain/launch"
"""Key of a name that all attempts share which one launcher starts."""
ATTEMPTS_KEY: Final = "disttrain/attempts"
"""Key of the number of attempts so far, this one included."""


@dataclass(frozen=True, slots=True)
class Process:
    """Who this process is, as torchrun says."""

    rank: int
    local_rank: int
    local_world_size: int
    world_size: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Process":
        """Read RANK, LOCAL_RANK, LOCAL_WORLD_SIZE and WORLD_SIZE; ConfigError names one that is missing."""
        try:
            names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
            return cls(*(int(environment[name]) for name in names))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"torchrun's environment is not complete ({error}); start with torchrun, or unset RANK to start all "
                "processes on this machine"
            ) from None


def check(config: TrainConfig, jobs: Jobs) -> None:
    """Find out in one process what would be wrong in all: the servers' view of the job, models, checkpoint, metrics.

    Raises:
        ValueError: something is wrong with the device, the job, the models, the checkpoint or the metrics file.
        ClientError: the servers refuse the job.
    """
    _require(config.device)
    require_unowned(config, name_run(config, jobs.training))
    job, sizes = jobs.training, Models.of(config, jobs.training.spec).describe()
    module_rates(config.optimizer, job.spec.execution.modules)
    found = _checkpoint(config, job)
    modules = job.spec.execution.modules
    reader = next((m.name for m in modules if m.holds_samples), modules[0].name)
    run = name_run(config, job)
    if config.compile:
        require_compiler(torch.device("cuda" if _gpus(config.device) else "cpu"))
    if config.tensorboard is not None:
        require_tensorboard()
    if config.wandb is not None:
        require_wandb()
    timeouts, shown = config.timeouts, config.credentials
    if jobs.held_out is not None:
        with DataClient(config.servers, jobs.held_out, reader, 0, timeouts=timeouts, credentials=shown) as client:
            evaluated_steps(config, jobs.held_out, client.num_steps)
    with DataClient(config.servers, job, reader, 0, timeouts=timeouts, credentials=shown) as client:
        if found is not None:
            run = continue_from(found, client, sizes).run or run
        else:
            require_new(job)
        if config.metrics is not None:
            bytes_before(config.metrics, run, client.step)


def _checkpoint(config: TrainConfig, job: Job) -> Stored | None:
    """The checkpoint to continue from, as far as it can be known without reading all of it."""
    directory = config.checkpoint.directory
    if directory is None:
        return None
    with owner_named(config):
        try:
            found = resumption(survey(directory), config.resume_from, digest_settings(config, job)).candidates
            damaged = [seen_damage(stored.path, stored.manifest) for stored in found]
        except OSError as error:
            raise ConfigError(
                f"the folder of checkpoints {directory} cannot be read ({error.strerror}); check its permissions and "
                "its storage, or give another --checkpoint.directory"
            ) from None
        if config.resume_from == ResumeFrom.NEWEST_WHOLE:
            found = tuple(stored for stored, damage in zip(found, damaged, strict=True) if not damage)
        elif found and damaged[0]:
            said = "; ".join(damaged[0][:4])
            raise CheckpointError(f"the checkpoint {found[0].path} cannot be read ({said}); {OTHERWISE}")
        if not found:
            return None
        stored_tensors(found[0].path)
        return found[0]


def shared_jobs(config: TrainConfig, process: Process) -> tuple[Jobs, Topology, Store]:
    """The jobs that the run's first process reads, has filled in, and hands to all others; and the store they share.

    Servers may differ in their quarantine lists, and so may fill in the same job differently: processes that did it
    each for themselves could train on different samples.

    Raises:
        ValueError: something is wrong with the configuration or the job.
        ClientError: no server could be reached, or they refuse the job.
        RankLostError: the first process ended before the others had the job.
    """
    if process.rank == 0:
        jobs, topology = prepare(config)
        topology.require_world_size(process.world_size)
        with translate_rank_errors("other ranks"):
            store = _store(process, config.timeout_s)
        store.set(JOBS_KEY, jobs.text)
    else:
        timeouts = config.timeouts
        patience = timeouts.first_answer + 2 * timeouts.register  # servers size all samples first
        with translate_rank_errors("rank 0"):
            store = _store(process, max(config.timeout_s, patience))
            text = store.get(JOBS_KEY).decode()
        jobs = Jobs.parse(text)
        topology = Topology.of(jobs.training.spec)
    return jobs, topology, store


def _store(process: Process, timeout_s: float) -> Store:
    """The store that the processes of this attempt share; each of them may wait so long for another."""
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", process.rank, process.world_size, timeout=timeout))
    own = join_attempt(store, process.rank, process.world_size, timeout_s)
    if process.rank == 0:
        own.set(LAUNCH_KEY, store.compare_set(LAUNCH_KEY, "", uuid.uuid4().hex))
        own.set(ATTEMPTS_KEY, str(store.add(ATTEMPTS_KEY, 1)))
    return own


def run_rank(config: TrainConfig, process: Process, stop: StopSignals) -> None:
    """Train as one of the processes."""
    jobs, topology, store = shared_jobs(config, process)
    cache_freed_memory()
    device = choose_device(config.device, process.local_rank, waits_for_single_ranks=not topology.is_uniform)
    # Beside a GPU the CPU has nothing to compute that is worth waking several cores for.
    cores = 1 if device.type == "cuda" else max(1, (os.cpu_count() or 1) // process.local_world_size)
    torch.set_num_threads(config.threads or cores)
    if config.compile:
        require_compiler(device)
    trainers: list[Trainer] = []
    ending = Ending()
    with ExitStack() as entered:
        leases = entered.enter_context(_owned(config, process, jobs.training, store, ending.end))
        control = Control(
            store,
            process.rank,
            process.world_size,
            str(topology.processes[process.rank]),
            lambda: trainers[0].doing if trainers else "joins the others",
            config.timeout_s,
        )
        ending.through(entered.enter_context(control))
        entered.enter_context(translate_torch_rank_errors())
        pairs = tied_pairs(Models.of(config, jobs.training.spec), topology).values()
        tied = [pair for several in pairs for pair in several]
        groups = entered.enter_context(process_groups(topology, device, config.timeout_s, store, process.rank, tied))
        _log.info("global rank %d is %s on %s", groups.rank, groups.process, device)
        for note in weight_notes(config, jobs.training.spec) if groups.rank == 0 else ():
            sys.stderr.write(f"note: {note}\n")
        trainer = Trainer(config, jobs.training, topology, groups, jobs.held_out, leases)
        trainers.append(trainer)
        pin = device.type == "cuda"
        with Streams.open(
            config.servers,
            jobs.training,
            groups.process,
            trainer.tensors,
            timeouts=config.timeouts,
            credentials=config.credentials,
            pin_memory=pin,
            tracing=config.tracing,
        ) as streams:
            trainer.resume(streams)
            if streams.step and groups.rank == 0:
                sys.stderr.write(f"resumed: {streams.step} of {streams.num_steps} steps are done\n")
            if config.progress and groups.rank == 0 and streams.step < streams.num_steps:
                models = Models.of(config, jobs.training.spec)
                sys.stderr.write(overview(models, topology, streams.step, streams.first.get_plan))
            metrics = leases.own.get("metrics")
            copied = metrics is not None and bool(metrics.note)  # whoever had the file may live, and have it open
            with closing(_writer(config, groups.rank, trainer, streams, copied=copied)) as writer:
                trainer.run(streams, stop, writer)


class Ending:
    """How another thread ends a run: at once, or as soon as there is a channel to end it by."""

    def __init__(self) -> None:
        self._control: Control | None = None
        self._said: str | None = None
        self._changing = threading.Lock()

    def end(self, said: str) -> None:
        """End the run, and say why."""
        with self._changing:
            self._said = said
            if self._control is not None:
                self._control.fail(said)

    def through(self, control: Control) -> None:
        """End it by this channel, now if it was to end before."""
        with self._changing:
            self._control = control
            if self._said is not None:
                control.fail(self._said)


@contextmanager
def _owned(
    config: TrainConfig, process: Process, job: Job, store: Store, lost: Callable[[str], None]
) -> Iterator[Leases]:
    """Own the run's outputs, before anything is written; only the first process does, which publishes for all.

    What torchrun starts again takes nothing over by force, or two runs that were both told to would do so in turns.

    Raises:
        LeaseError: another run owns them; of the others, which leave it to the first one to say so, RunEndedError.
    """
    if process.rank != 0:
        with translate_rank_errors("rank 0"):
            said = json.loads(store.get(OWNED_KEY))
        if "refused" in said:
            raise RunEndedError(said["refused"], reports=False)
        profiles = outputs(config, name_run(config, job)).get("profile")
        followed = None if profiles is None else FollowedLease(profiles, said["profile"])
        yield Leases(profile=followed if followed is not None and followed.is_here else None)
        return
    launch, attempts = store.get(LAUNCH_KEY).decode(), int(store.get(ATTEMPTS_KEY))
    owner = Owner.here(name_run(config, job), launch=launch)
    with ExitStack() as taken:
        try:
            take_over = config.take_over and attempts == 1
            leases = taken.enter_context(owned(config, owner, lost, take_over=take_over))
        except LeaseError as error:
            store.set(OWNED_KEY, json.dumps({"refused": str(error)}))
            raise
        profile = leases.get("profile")
        store.set(OWNED_KEY, json.dumps({"profile": profile and profile.number}))
        yield Leases(leases, profile)


def _gpus(wanted: Device) -> int:
    """GPUs of this machine, as far as they are to be used."""
    return torch.cuda.device_count() if wanted is not Device.CPU and torch.cuda.is_available() else 0


def choose_device(wanted: Device, local_rank: int, *, waits_for_single_ranks: bool) -> torch.device:
    """The device of a process; on CUDA it becomes torch's current one, for CPUs the process no longer sees any GPU.

    Args:
        wanted: as the configuration has it.
        local_rank: of the process on its machine.
        waits_for_single_ranks: whether the process waits for some of the others in the middle of what it computes.

    Raises:
        ConfigError: there is no GPU, or there are fewer than processes on this machine.
    """
    # With fewer queues than communicators, a transfer could stand behind a receive that waits in another one. Set
    # before the driver is asked for anything, since it reads this once.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if waits_for_single_ranks:
        # A kernel that is used first is loaded then, for which the driver waits for those that run. Transfers run until
        # the other rank takes part, which may wait likewise: seen as processes that wait in a circle.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # Microbatches differ in size: blocks of one would not fit the next, until the allocator stops to free them all.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if wanted is Device.CPU:
        # Parts of torch, such as checkpoints, take any GPU that they find, and fail where it is not free.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _require(wanted)
    count = _gpus(wanted)
    if not count:
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            f"this is process {local_rank} of its machine, which has {count} GPUs; start one process for each GPU, or "
            "use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _require(device: Device) -> None:
    """Raise ConfigError if the device that is asked for by name is not there."""
    if device is Device.CUDA and not torch.cuda.is_available():
        raise ConfigError("device is cuda but torch finds no GPU; use --device cpu or install a CUDA build of torch")


def _writer(
    config: TrainConfig, rank: int, trainer: Trainer, streams: Streams, *, copied: bool = False
) -> MetricsWriter:
    """Only global rank 0 writes; the others' writer writes nothing."""
    if rank != 0:
        return MetricsWriter()
    sinks: list[Sink] = []
    run, first = trainer.run_name, streams.step - trainer.owes_evaluation
    if config.metrics is not None:
        sinks.append(JsonLines(config.metrics, run, first, copied=copied))
    if config.tensorboard is not None:
        sinks.append(TensorBoard(config.tensorboard, first))
    if config.wandb is not None:
        shown = config.model_dump(mode="json") | {"job_id": streams.job.job_id}
        sinks.append(WeightsAndBiases(config.wandb, run, shown))
    if config.progress:
        num_steps = streams.num_steps
        sinks.append(Screen(Console(file=sys.stderr), min(num_steps, config.steps or num_steps)))
    return MetricsWriter(sinks)
