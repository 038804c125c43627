"""What a run needs to know before it needs torch: its jobs, and which processes train them."""

import json
from dataclasses import dataclass
from typing import Self

from dataserver.planning.job.fields import parse_json
from dataserver.planning.job.identity import Job, parse_job
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import resolve_job
from trainclient.topology.process_grid import Topology
from trainclient.training.config import ConfigError, ContrastiveConfig, TrainConfig


@dataclass(frozen=True, slots=True)
class Jobs:
    """What a run trains, and what it is evaluated on."""

    training: Job
    held_out: Job | None = None

    @property
    def text(self) -> str:
        """Both jobs as one text."""
        return json.dumps([job.text for job in (self.training, self.held_out) if job is not None])

    @classmethod
    def parse(cls, text: str) -> Self:
        """Make the jobs from the text that was sent to this process."""
        return cls(*(parse_job(parse_json(job)) for job in json.loads(text)))


def prepare(config: TrainConfig) -> tuple[Jobs, Topology]:
    """The jobs of a run and the topology of its processes.

    Raises:
        ValueError: something is wrong with the configuration or the job.
        ClientError: no server could be reached, or they lack what the job names.
    """
    job_file, servers = config.require_inputs()
    fleet = Fleet(servers, timeouts=config.timeouts, credentials=config.credentials)
    try:
        job = resolve_job(job_file, fleet)
        topology = Topology.of(job.spec)
        if job.stream.contrastive_batch is None and config.contrastive != ContrastiveConfig():
            raise ConfigError(
                "contrastive is given, and the job has no contrastive_batch, so no towers; leave contrastive out, or "
                "give a job with towers and a contrastive_batch"
            )
        if all(m.frozen for m in job.spec.execution.modules):
            raise ConfigError("all modules of the job are frozen, so nothing would be trained; leave out frozen of one")
        if config.evaluation.job is None:
            return Jobs(job), topology
        from trainclient.training.evaluation import held_out_job  # it compares models

        return Jobs(job, held_out_job(config, config.evaluation.job, fleet, job)), topology
    finally:
        fleet.close()
