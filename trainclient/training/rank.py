"""One process of a run, from torchrun's environment to the end of training."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from rich.console import Console
from torch.distributed.rendezvous import rendezvous

from dataserver.planning.identity import Job, parse_job
from dataserver.planning.jobspec import parse_json
from trainclient.allocator import keep_freed_memory
from trainclient.client import DataClient
from trainclient.parallel.groups import Groups, process_groups
from trainclient.parallel.topology import Topology
from trainclient.parallel.transport import contact
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import resolve_job
from trainclient.training.checkpoint import complete_checkpoints
from trainclient.training.config import ConfigError, Device, TrainConfig
from trainclient.training.loop import Trainer, continue_from
from trainclient.training.metrics import MetricsWriter
from trainclient.training.modules import ModelConfigs
from trainclient.training.signals import StopSignals

_log = logging.getLogger(__name__)

JOB_KEY: Final = "disttrain/job"
"""Of the complete job, as canonical JSON, in the store of all processes."""


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


def prepare(config: TrainConfig) -> tuple[Job, Topology]:
    """The job and the topology of its processes.

    Raises:
        ValueError: something is wrong with the configuration or the job.
        ClientError: no server could be reached, or they lack what the job names.
    """
    job_file, servers = config.require_inputs()
    fleet = Fleet(servers, timeouts=config.timeouts)
    try:
        job = resolve_job(job_file, fleet)
    finally:
        fleet.close()
    return job, Topology.of(job.spec)


def check(config: TrainConfig, job: Job) -> None:
    """Find out in one process what would be wrong in all of them: the servers' view of the job, models, checkpoint.

    Raises:
        ValueError: something is wrong with the job, the models or the checkpoint.
        ClientError: the servers refuse the job.
    """
    sizes = ModelConfigs.of(config, job.spec).describe_all(job.spec)
    found = complete_checkpoints(config.checkpoint.directory) if config.checkpoint.directory is not None else []
    backbone = job.spec.execution.backbone.name
    with DataClient(config.servers, job, backbone, 0, timeouts=config.timeouts) as client:
        if found:
            continue_from(found[-1], client, sizes)


@contextmanager
def shared_job(config: TrainConfig, process: Process) -> Iterator[tuple[Job, Topology]]:
    """The job that the run's first process reads, has filled in, and hands to all others.

    Servers may differ in their quarantine lists, and so may fill in the same job differently: processes that did it
    each for themselves could train on different samples.

    Raises:
        ValueError: something is wrong with the configuration or the job.
        ClientError: no server could be reached, or they refuse the job.
        PeerLostError: the first process ended before the others had the job.
    """
    if process.rank == 0:
        job, topology = prepare(config)
        topology.require_world_size(process.world_size)
        store = _store(process, config.timeout_s)
        store.set(JOB_KEY, job.text)
    else:
        timeouts = config.timeouts
        patience = timeouts.first_answer + 2 * timeouts.register  # servers size all samples first
        with contact("rank 0"):
            store = _store(process, max(config.timeout_s, patience))
            text = store.get(JOB_KEY).decode()
        job = parse_job(parse_json(text))
        topology = Topology.of(job.spec)
    # The first process may be the one that holds the store for the others, and process groups are found through it.
    yield job, topology
    del store


def _store(process: Process, timeout_s: float) -> Any:
    """The torch store that the processes share; each of them may wait so long for another."""
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(rendezvous("env://", process.rank, process.world_size, timeout=timeout))
    return store


def run_rank(config: TrainConfig, process: Process, stop: StopSignals) -> None:
    """Train as one of the processes."""
    with shared_job(config, process) as (job, topology):
        _train(config, process, stop, job, topology)


def _train(config: TrainConfig, process: Process, stop: StopSignals, job: Job, topology: Topology) -> None:
    keep_freed_memory()
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // process.local_world_size))
    device = choose_device(config.device, process.local_rank)
    with process_groups(topology, device, config.timeout_s) as groups:
        _log.info("global rank %d is %s on %s", groups.rank, groups.place, device)
        trainer = Trainer(config, job, topology, groups)
        with _open(config, job, groups, trainer) as client:
            trainer.resume(client)
            if client.step and groups.rank == 0:
                sys.stderr.write(f"resumed: {client.step} of {client.num_steps} steps are done\n")
            with closing(_writer(config, groups.rank, client.num_steps)) as writer:
                trainer.run(client, stop, writer)


def _open(config: TrainConfig, job: Job, groups: Groups, trainer: Trainer) -> DataClient:
    """The stream of this process's views."""
    place = groups.place
    return DataClient(
        config.servers,
        job,
        place.module.name,
        place.rank,
        tensors=trainer.tensors,
        timeouts=config.timeouts,
        pin_memory=groups.device.type == "cuda",
    )


def choose_device(wanted: Device, local_rank: int) -> torch.device:
    """The device of a process; on CUDA it becomes torch's current one.

    Raises:
        ConfigError: there are fewer GPUs than processes on this machine.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() and wanted is not Device.CPU else 0
    if not count:
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            f"this is process {local_rank} of its machine, which has {count} GPUs; start one process for each GPU, or "
            "use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _writer(config: TrainConfig, rank: int, num_steps: int) -> MetricsWriter:
    """Only global rank 0 writes; the others' writer writes nothing."""
    if rank != 0:
        return MetricsWriter(None, None, num_steps)
    console = Console(file=sys.stderr) if config.progress else None
    return MetricsWriter(config.metrics, console, min(num_steps, config.steps or num_steps))
