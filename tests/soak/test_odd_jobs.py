"""A thousand odd jobs beside a good one: its reader gets every byte, memory stays flat, and the server ends in time."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from builders.jobs import module
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from e2e.streams import digest, read_views, start_servers, views_of
from faults.processes import Member
from serving.harness import FIXED_WINDOW, index, job_data, reason_of
from shards import write_pairs
from soak.usage import Server

from dataserver.cli.warm import warm_up
from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config
from trainclient.client import DataClient
from trainclient.stream.endpoint import Timeouts

MIB = 1 << 20
JOBS = 1000
WARM = 400
"""Jobs after which all caches are full."""
HELD = 40
"""Streams that nobody reads at a time; then the oldest is given up."""
GRACE_S = 10
ENDING_S = 10
"""For the end of the process, on a busy machine."""
BUDGETS_MIB = {"prefetch-bytes": 16, "job-bytes": 64}
SPARE_MIB = 24
"""As in `test_flat.py`: what comes and goes by chance."""
TIMEOUT_S = 120

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


class GoodReader:
    """Reads all of a job from a server, again and again, beside the others; what differs from an undisturbed run."""

    def __init__(self, address: str, job: Job, undisturbed: Any) -> None:
        self._address, self._job, self._undisturbed = address, job, undisturbed
        self._ending = threading.Event()
        self.rounds = 0
        self.wrong: list[str] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Wait until it has read the job to its end."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                found = read_views([self._address], self._job, digest, timeouts=Timeouts(give_up=TIMEOUT_S))
                if found != self._undisturbed:
                    self.wrong.append(f"round {self.rounds} differs")
                self.rounds += 1
        except Exception as error:  # the test says it
            self.wrong.append(f"round {self.rounds} ended: {error!r}")


class OddClients:
    """Clients that bring jobs, and do with each something else that no good one does."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._held: list[tuple[grpc.Channel, Any]] = []
        self.refused = 0
        """Streams for which the server had no place."""
        self._ways = (self.create, self.cancel, self.abandon, self.plan, self.vanish)

    def bring(self, number: int) -> None:
        """Another job, as large as it likes."""
        modules = [module("encoder", dp=1 + number % 5), module("backbone", dp=2 ** (number % 4))]
        data = job_data(
            modules=modules, datasets=[{"name": "pairs"}], generation={"ratio": "0"}, seed=number,
            global_batch=16, sizing={"max_patches": 64 + 64 * (number % 8)}, end={"steps": 50},
        )  # fmt: skip
        self._ways[number % len(self._ways)](json.dumps(data), number)

    def create(self, text: str, _: int) -> None:
        """Make a job known, and come never again."""
        with grpc.insecure_channel(self._address) as channel:
            self._created(channel, text)

    def cancel(self, text: str, _: int) -> None:
        """Open a stream and cancel it at once, and one behind its first message."""
        with grpc.insecure_channel(self._address) as channel:
            job_id = self._created(channel, text)
            self._opened(channel, job_id, 0).cancel()
            stream = self._opened(channel, job_id, 1)
            self._first(stream)
            stream.cancel()

    def abandon(self, text: str, _: int) -> None:
        """Hold a stream without reading more than its first message."""
        channel = grpc.insecure_channel(self._address, FIXED_WINDOW)
        stream = self._opened(channel, self._created(channel, text), 0)
        self._first(stream)
        self._held.append((channel, stream))
        if len(self._held) > HELD:
            self._give_up(1)

    def plan(self, text: str, number: int) -> None:
        """Ask for a plan with hardly any time for it."""
        with grpc.insecure_channel(self._address) as channel:
            request = pb.GetPlanRequest(job_id=self._created(channel, text), step=number % 50)
            with suppress(grpc.RpcError):
                DataServiceStub(channel).GetPlan(request, timeout=0.02)

    def vanish(self, text: str, number: int) -> None:
        """Close the connection under a stream that was asked for, without a word."""
        channel = grpc.insecure_channel(self._address)
        self._opened(channel, self._created(channel, text), number % 50)
        channel.close()

    def close(self) -> None:
        """Give up all that is held."""
        self._give_up(len(self._held))

    def _give_up(self, count: int) -> None:
        for channel, stream in self._held[:count]:
            stream.cancel()
            channel.close()
        del self._held[:count]

    def _created(self, channel: grpc.Channel, text: str) -> str:
        request = pb.GetOrCreateJobRequest(job_spec_json=text)
        while True:
            try:
                return DataServiceStub(channel).GetOrCreateJob(request, timeout=TIMEOUT_S).job_id
            except grpc.RpcError as error:  # of another sizing, on a busy machine
                if reason_of(error)[1] != "STATISTICS_PENDING":
                    raise

    def _opened(self, channel: grpc.Channel, job_id: str, step: int) -> Any:
        request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", start_step=step)
        return DataServiceStub(channel).StreamMicrobatches(request, timeout=10 * TIMEOUT_S)

    def _first(self, stream: Any) -> None:
        try:
            next(stream)
        except grpc.RpcError as error:
            if reason_of(error)[1] not in ("TOO_MANY_STREAMS", "JOB_UNKNOWN"):
                raise
            self.refused += 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    warm_up()
    return index(write_pairs(tmp_path / "pairs", 48, 6, seed=1, median_size=160))


@pytest.fixture
def member(folder: Path, tmp_path: Path) -> Iterator[Member]:
    flags = {"max-streams": HELD + 24, "drain-grace-s": GRACE_S, "idle-timeout-s": 3600}
    flags |= {name: size * MIB for name, size in BUDGETS_MIB.items()}
    options = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    with closing(Member(["--dataset", f"pairs={folder}", *options], tmp_path / "log")) as found:
        yield found


def test_a_thousand_odd_jobs_beside_a_good_one(folder: Path, member: Member) -> None:
    data = job_data(datasets=[{"name": "pairs"}], end={"steps": 6})
    job = parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": {"pairs": folder}}))))
    server = Server(psutil.Process(member.process.pid), member.address)
    with ExitStack() as stack:
        (alone,) = start_servers(stack, ["--dataset", f"pairs={folder}"], 1)
        undisturbed = read_views([alone], job, digest)
    assert len(undisturbed) == len(views_of(job))
    reader = GoodReader(member.address, job, undisturbed)
    odd, sizes = OddClients(member.address), []
    try:
        for number in range(JOBS):
            odd.bring(number)
            sizes.append(server.usage().rss)
    finally:
        reader.end()
    assert (reader.wrong, reader.rounds >= 2) == ([], True)
    assert odd.refused < JOBS // 10, "the server had places for nearly all"
    # Beside the budgets, each stream owns one microbatch; both are as full before as behind.
    assert max(sizes[WARM:]) - max(sizes[:WARM]) < SPARE_MIB * MIB
    check_drain(member, odd, job)
    assert "Traceback" not in member.log.read_text()


def check_drain(member: Member, odd: OddClients, job: Job) -> None:
    """The server ends within its grace, whoever still holds streams, a reader that takes nothing more among them."""
    with closing(odd), DataClient(member.address, job, "vit", 0, timeouts=Timeouts(give_up=1)) as client:
        next(iter(client))
        began = time.monotonic()
        member.drain()
        assert member.wait() == 0
        assert time.monotonic() - began < GRACE_S + ENDING_S
