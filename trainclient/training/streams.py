"""The views of one process: a client for each module that it runs, all in the same step."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from dataserver.planning.job.identity import Job
from trainclient.client import DataClient
from trainclient.exchange.plan_check import PlanCheckedBatches
from trainclient.exchange.view_broadcast import Batches, BroadcastBatches, SharedBatches
from trainclient.topology.process_grid import GridProcess
from trainclient.topology.process_groups import Groups


class Streams:
    """The data clients of a process, which go on together."""

    def __init__(self, clients: Mapping[str, DataClient]) -> None:
        """Take clients by the modules whose views they read, in the order of the process's modules."""
        self.clients = dict(clients)
        self.first = next(iter(self.clients.values()))
        """The client to ask what concerns the whole job."""

    @classmethod
    def open(
        cls,
        servers: str | Sequence[str],
        job: Job,
        process: GridProcess,
        tensors: Mapping[str, Sequence[str]],
        **options: Any,
    ) -> Self:
        """Open the streams of a process.

        Args:
            servers: as `DataClient` takes them.
            job: the complete job.
            process: what the process is.
            tensors: names of those that each module reads.
            options: of the clients, see there: timeouts, credentials, pin_memory, tracing.

        Raises:
            ClientError: no server could be reached, or they refuse the job.
        """
        with ExitStack() as opened:
            clients = {
                m.name: opened.enter_context(
                    DataClient(servers, job, m.name, process.rank, tensors=tensors[m.name], share_fetch=True, **options)
                )
                for m in process.modules
            }
            opened.pop_all()
        return cls(clients)

    @property
    def job(self) -> Job:
        """The job of all streams."""
        return self.first.job

    @property
    def step(self) -> int:
        """The step of the next microbatch."""
        return self.first.step

    @property
    def num_steps(self) -> int:
        """Number of steps in the job."""
        return self.first.num_steps

    def batches(self, groups: Groups) -> list[Batches]:
        """What the interpreter reads, one iterator for each module; who works on the same view shares one fetch.

        Ranks whose collectives take sizes from the plan compare the plan of each step first.
        """
        shared, pin = groups.communicators.shared, groups.device.type == "cuda"
        found: list[Batches] = [*self.clients.values()]
        if groups.reading is not None:
            found = [BroadcastBatches(client, groups.reading, pin=pin) for client in self.clients.values()]
        if groups.plan_checking is not None:
            found[0] = PlanCheckedBatches(found[0], groups.plan_checking)
        if shared is not None and groups.fetching:
            found = [SharedBatches(batches, shared, groups.fetching, pin=pin) for batches in found]
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the position as `DataClient.state_dict`, which does not depend on the module."""
        return self.first.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; errors as in `DataClient.load_state_dict`."""
        for client in self.clients.values():
            client.load_state_dict(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients.values():
            client.close()
