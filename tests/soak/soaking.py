"""Servers and readers under faults for as long as is wanted: every digest right, and nothing that grows.

Two datasets, one on disk and one in S3, are read by all ranks of a job, again and again, while something happens to one
of the servers, or to the way to the store, every few seconds. Servers own blocks of the store's shards, and read them
ahead; memory and disks of all hold half of them. The first server is never killed: what it holds must stay what it was.
"""

import argparse
import faulthandler
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from benchmarks.data_connections import wrong_with
from builders.jobs import module
from disttrain.v1.admin_service_pb2 import GetMetricsRequest
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from e2e.streams import View, dataset_flags, digest, read_views, used_address, views_of
from faults.fleet import FAULTS, Jobs, Site, sites_of
from faults.relay import Mode, Relay, relayed
from ports import free_addresses
from serving.harness import index, job_data
from shards import write_pairs
from soak.report import Report, Usage, write_report
from stores import AWS, ask

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.kernels.cache import user_cache
from dataserver.serving.config import load_config
from trainclient.client import DataClient
from trainclient.stream.endpoint import Timeouts

SERVERS: Final = 3
RANKS: Final = 4
"""Of the encoder, and of the backbone: twice as many readers."""
STEPS: Final = 16
"""Of the job; then readers begin with its first one again, and what is read ahead with them."""
WINDOW: Final = 2
"""Shards that are mixed."""
MEMORY_PART: Final = 12
DISK_PART: Final = 6
"""A server's memory and disk hold these parts of the shards in the store."""
ENDS: Final = ("kill", "drain")
"""Faults after which a server is another process."""
STALL_S: Final = 60.0
"""A reader that gets nothing for so long is stalled. Clients notice a server that does not answer within 8 s."""
STORE_FAULTS: Final[Mapping[str, tuple[Mode, float]]] = {
    "store gone": (Mode.RESET, 2.0),
    "store frozen": (Mode.FREEZE, 15.0),
}
"""What happens to the way to the store, and for how many seconds at most: silence is given up after 10 s."""


class Readers:
    """All ranks of a job, each in a thread, from its first step to its last and again until they are told to end."""

    def __init__(
        self, addresses: Sequence[str], job: Job, expected: Mapping[View, list[Any]], report: Report, pause_s: float
    ) -> None:
        self._addresses, self._job, self._expected, self._report = addresses, job, expected, report
        self._pause_s = pause_s
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.progress = dict.fromkeys(expected, (time.monotonic(), "a server"))
        """When each reader got its last microbatch, and what it waits for since."""
        self._threads = [threading.Thread(target=self._run, args=(view,), name=f"{view}") for view in expected]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait until each has read what it waits for."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _run(self, view: View) -> None:
        try:
            while not self._ending.is_set():
                self._read(view)
        except Exception as error:  # it is in the report, and ends the run
            self._wrong(f"{view} ended: {error!r}")

    def _read(self, view: View) -> None:
        with DataClient(
            self._addresses, self._job, *view, timeouts=Timeouts(give_up=3 * self._report.stall_s)
        ) as client:
            expected = deque(self._expected[view])
            for batch in client:
                found, wanted = digest(batch), expected.popleft()
                if found != wanted:
                    self._wrong(f"{view}: {found.position} differs from {wanted.position} of the undisturbed run")
                self._note(view, client, expected[0] if expected else None)
                if self._ending.wait(self._pause_s):
                    return
            if expected:
                self._wrong(f"{view}: the job ended before {expected[0].position}")

    def _note(self, view: View, client: DataClient, following: Any) -> None:
        what = "the end of the job" if following is None else "step {1}, microbatch {2}".format(*following.position)
        now = time.monotonic()
        with self._lock:
            self._report.microbatches += 1
            self._report.longest_wait_s = max(self._report.longest_wait_s, now - self.progress[view][0])
            self.progress[view] = now, f"{what} from {used_address(client)}"

    def _wrong(self, what: str) -> None:
        with self._lock:
            self._report.wrong.append(what)


def soak(
    folders: Mapping[str, Path],
    stored_bytes: int,
    folder: Path,
    store: Relay,
    report: Report,
    pause_s: float,
    servers: int = SERVERS,
    enough: Callable[[Report], bool] | None = None,
) -> None:
    """Read under faults, and fill in a report.

    Args:
        folders: of the datasets: `local`, and `s3` behind the endpoint in the environment.
        stored_bytes: size of the shards in S3.
        folder: takes logs and blocks.
        store: the way to the store.
        report: says for how long, and with which seed.
        pause_s: what each reader does with a microbatch, in seconds.
        servers: how many there are.
        enough: asked after each fault; ends it before the time that the report says.
    """
    memory = ["--block-memory-bytes", str(stored_bytes // MEMORY_PART)]
    flags = [*dataset_flags(folders), "--drain-grace-s", "5", "--no-shared-memory", *memory]
    modules = [module("encoder", dp=RANKS), module("backbone", dp=RANKS)]
    data = job_data(
        datasets=[{"name": name} for name in folders], modules=modules, end={"steps": STEPS}, global_batch=16,
        generation={"ratio": "0"}, order_version=2, shuffle_window=WINDOW,
    )  # fmt: skip
    job = parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": folders}))))
    assert len(views_of(job)) == 2 * RANKS
    with ExitStack() as stack:
        sites = sites_of(stack, flags, folder, servers, peers=True, block_bytes=stored_bytes // DISK_PART)
        expected = read_views([sites[0].address], job, digest)
        if (wrong := wrong_with(sites[0].address)) is not None:
            report.wrong.append(f"before any fault: {wrong}")
        readers = Readers([site.address for site in sites], job, expected, report, pause_s)
        try:
            _disturb(sites, store, Jobs(job.text, data), readers, report, enough)
        except Exception as error:
            report.wrong.append(f"it ended early: {error!r}"[:2000])
            raise
        finally:
            readers.end()
        report.image_bytes = image_bytes([site.address for site in sites])
        _look_into_logs(sites, report)


def image_bytes(addresses: Sequence[str]) -> dict[str, int]:
    """Bytes that servers have had from stores, and from the blocks that they and others hold."""
    found = dict.fromkeys(("the store", "memory", "disks", "owners"), 0)
    for address in addresses:
        with grpc.insecure_channel(address) as channel:
            reads = AdminServiceStub(channel).GetMetrics(GetMetricsRequest(), timeout=STALL_S).store_reads
        counts = reads.bytes, reads.memory_bytes, reads.disk_bytes, reads.owner_bytes
        found = {source: found[source] + count for source, count in zip(found, counts, strict=True)}
    return found


def _look_into_logs(sites: Sequence[Site], report: Report) -> None:
    """Report tracebacks; while the servers' disks are mounted, since their logs lie there."""
    for site in sites:
        _, found, traceback = site.member.log.read_text().partition("Traceback")
        if found:
            report.wrong.append(f"{site.address} logged: {found}{traceback[:2000]}")


def _disturb(
    sites: Sequence[Site],
    store: Relay,
    jobs: Jobs,
    readers: Readers,
    report: Report,
    enough: Callable[[Report], bool] | None,
) -> None:
    """Let things happen until time is over or it is enough, and look at what is held meanwhile."""
    rng, began = random.Random(report.seed), time.monotonic()
    first, own = psutil.Process(sites[0].member.process.pid), psutil.Process()
    stalled = began
    while (now := time.monotonic()) < began + report.seconds and not report.wrong:
        kind = rng.choice([*FAULTS, *STORE_FAULTS])
        site = rng.choice(sites[1:] if kind in ENDS else sites)
        report.faults[kind] = report.faults.get(kind, 0) + 1
        mode, longest_s = STORE_FAULTS.get(kind, (Mode.PASS, 2.0))
        with store_in(store, mode) if kind in STORE_FAULTS else FAULTS[kind](site, jobs):
            time.sleep(rng.uniform(0.2, longest_s))
        time.sleep(rng.uniform(0.2, 2))
        report.server.append(Usage.of(first, began))
        report.readers.append(Usage.of(own, began))
        oldest = min(at for at, _ in readers.progress.values())
        if now - max(oldest, stalled) > report.stall_s:
            stalled = now
            report.stalls += 1
            tell_stall(sites, readers)
        if enough is not None:
            report.image_bytes = image_bytes([site.address for site in sites])
            if enough(report):
                return


@contextmanager
def store_in(store: Relay, mode: Mode) -> Iterator[None]:
    """Something happens on the way to a store."""
    store.set(mode)
    try:
        yield
    finally:
        store.set(Mode.PASS)


def tell_stall(sites: Sequence[Site], readers: Readers) -> None:
    """Write what each reader waits for, and what all threads of readers and servers are doing."""
    for view, (at, what) in readers.progress.items():
        sys.stderr.write(f"{view} has waited {time.monotonic() - at:.0f} s for {what}\n")
    faulthandler.dump_traceback(sys.stderr.fileno(), all_threads=True)
    for site in sites:
        with suppress(ProcessLookupError):
            site.member.process.send_signal(signal.SIGUSR1)
    time.sleep(1)
    for site in sites:
        sys.stderr.write(f"{site.address}:\n{site.member.log.read_text()[-20_000:]}\n")


@contextmanager
def behind_a_relay(endpoint: str) -> Iterator[Relay]:
    """A relay to an S3 server, which the environment then names."""
    before = os.environ.pop("AWS_ENDPOINT_URL", None)
    with relayed(endpoint.removeprefix("http://")) as relay:
        os.environ["AWS_ENDPOINT_URL"] = f"http://{relay.address}"
        yield relay
    del os.environ["AWS_ENDPOINT_URL"]
    if before is not None:
        os.environ["AWS_ENDPOINT_URL"] = before


@contextmanager
def moto(folder: Path) -> Iterator[str]:
    """The address of moto's S3, in another process, with the shards of a folder in `s3://bucket/laion`."""
    server = Path(sys.executable).with_name("moto_server")
    (address,) = free_addresses(1)
    host, port = address.split(":")
    with (folder.parent / "moto.log").open("w") as log:
        process = subprocess.Popen([server, "-H", host, "-p", port], stdout=log, stderr=log)
    try:
        url = f"http://{address}"
        ask(f"{url}/bucket", "PUT")
        for file in (*folder.glob("*.tar"), *folder.glob("*.parquet")):
            ask(f"{url}/bucket/laion/{file.name}", "PUT", file.read_bytes())
        yield url
    finally:
        process.kill()
        process.wait()


def bytes_of(folder: Path) -> int:
    """Size of all shards of a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.tar"))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="default 10; 60 for the report in the docs")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; drawn if left out")
    parser.add_argument("--pause-s", type=float, default=0.05, help="what readers do with each microbatch (0.05)")
    parser.add_argument(
        "--stall-s", type=float, default=STALL_S, help="seconds without a microbatch that are told (60)"
    )
    parser.add_argument("--report", type=Path, help="file for the report, in Markdown; a JSON file beside it has all")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    report = Report(arguments.minutes * 60, seed, arguments.stall_s)
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        folder = Path(root)
        if (kernels := user_cache()) is not None:
            os.environ.setdefault("NUMBA_CACHE_DIR", str(kernels))  # they stay where they are compiled
        os.environ.update({**AWS, "XDG_CACHE_HOME": str(folder / "cache")})
        local = index(write_pairs(folder / "local", 240, 40, seed=1))
        remote = write_pairs(folder / "remote", 120, 5, seed=2)
        address = stack.enter_context(moto(remote))
        store = stack.enter_context(behind_a_relay(address))
        folders = {"local": local, "s3": index(Path("s3://bucket/laion"))}
        try:
            soak(folders, bytes_of(remote), folder, store, report, arguments.pause_s)
        finally:
            sys.stdout.write(f"{report.text()}\n")
            if arguments.report is not None:
                write_report(report, arguments.report)
    return 1 if report.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
