"""This service beside MosaicML Streaming and webdataset on one object store: bytes, requests, CPU time, first batch.

Each reads one shuffled epoch of the same photographs, with nothing cached, from a store in another process that answers
each request after a delay. CPU time is that of all processes of a loader between its first batch and its last; a first
batch is counted from the start of its programs.
"""

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
from loaders.installing import python_of
from loaders.reporting import PREPARE

from benchmarks.rows import Row

SCRIPTS: Final = Path(__file__).resolve().parents[1]
OURS: Final = "this service, sent over TCP"
SHARDS: Final = 16
ENVIRONMENT: Final = {
    **os.environ,
    "PYTHONPATH": str(SCRIPTS),
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_REGION": "us-east-1",
}


@dataclass(frozen=True, slots=True)
class Rival:
    """One loader that reads from a store."""

    name: str
    program: str
    """Module in `scripts/loaders` that runs it."""
    environment: str | None = None
    """Virtual environment of its own; it reads a copy of the shards in its own format."""


RIVALS: Final = (
    Rival(OURS, "stored_service"),
    Rival("MosaicML Streaming, 2 workers", "stored_mosaic", "mosaic"),
    Rival("webdataset, 2 workers", "stored_webdataset"),
)


@dataclass(frozen=True, slots=True)
class Epoch:
    """What it took to read one epoch."""

    images: int
    cpu_ms: float
    """CPU time for an image, of all processes together."""
    first_s: float
    requests: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class Store:
    """A store in another process."""

    address: str
    process: "subprocess.Popen[str]"

    def counts(self) -> tuple[int, int]:
        """Requests so far, and bytes of objects that were sent."""
        assert self.process.stdout is not None
        _go_on(self.process)
        requests, sent_bytes = map(int, self.process.stdout.readline().split())
        return requests, sent_bytes


@contextmanager
def store_of(folder: Path, delay_s: float, copy: Path | None = None) -> Iterator[Store]:
    """Serve the shards of a folder from another process, and a copy of them beside."""
    line = [sys.executable, "-m", "benchmarks.range_server", str(folder), str(delay_s)]
    line += [] if copy is None else [str(copy)]
    with _started(line, ENVIRONMENT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Store(process.stdout.readline().strip(), process)
        process.stdin.close()


def rows_beside_rivals(count: int, rounds: int, seed: int, delay_s: float) -> list[Row]:
    """A row for each loader that is installed."""
    rivals = [r for r in RIVALS if r.environment is None or python_of(r.environment) is not None]
    found: dict[str, list[Epoch | None]] = {rival.name: [] for rival in rivals}
    with tempfile.TemporaryDirectory() as root:
        shards = Path(root) / "shards"
        drawn = ["--samples", str(count), "--shards", str(SHARDS), "--seed", str(seed)]
        _run([sys.executable, str(SCRIPTS / "fixtures" / "make_demo_shards.py"), str(shards), *drawn])
        _run([sys.executable, "-m", "dataserver", "warm"])
        copy = _copied(shards, rivals)
        needed = sum(file.stat().st_size for file in shards.glob("*.tar"))
        with store_of(shards, delay_s, copy) as store:
            environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": store.address, "S3_ENDPOINT_URL": store.address}
            _run([sys.executable, "-m", "dataserver", "index", "s3://bucket/shards"], environment)
            for number in range(rounds):
                for rival in rivals[number % len(rivals) :] + rivals[: number % len(rivals)]:
                    epoch = _epoch(rival, store, environment)
                    print(f"round {number + 1}: {rival.name}: {epoch or 'failed, see above'}", flush=True)
                    found[rival.name].append(epoch)
    return list(_rows(found, needed, count))


def _copied(shards: Path, rivals: list[Rival]) -> Path | None:
    """The copy that a rival reads; None if it is not installed."""
    for rival in rivals:
        if rival.environment is not None:
            _run([str(python_of(rival.environment)), "-m", "loaders.mosaic", str(shards), "0", PREPARE])
            return shards.with_name("mosaic")
    return None


def _started(line: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(line, text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _run(line: list[str], environment: dict[str, str] = ENVIRONMENT) -> None:
    subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)


def _epoch(rival: Rival, store: Store, environment: dict[str, str]) -> Epoch | None:
    """Run a loader over one epoch; None where a rival ends before."""
    python = sys.executable if rival.environment is None else str(python_of(rival.environment))
    folder = tempfile.mkdtemp()
    data = f"{store.address}/bucket/shards/{{00000..{SHARDS - 1:05}}}.tar"
    given = [data] if rival.program == "stored_webdataset" else ["s3://bucket", folder]
    requests, sent_bytes = store.counts()
    began = time.perf_counter()
    process = _started([python, "-m", f"loaders.{rival.program}", *given], environment)
    try:
        _said(process, "first")
        first_s, cpu_s = time.perf_counter() - began, _cpu_s(process)
        _go_on(process)
        images = int(_said(process, "end").split()[1])
        cpu_s = _cpu_s(process) - cpu_s
        _go_on(process)
        process.wait(60)
    except EOFError as error:
        if rival.name == OURS:
            raise SystemExit(str(error)) from None
        return None
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.wait()
        shutil.rmtree(folder)
    after = store.counts()
    return Epoch(images, cpu_s / images * 1e3, first_s, after[0] - requests, after[1] - sent_bytes)


def _said(process: "subprocess.Popen[str]", word: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith(word):
        raise EOFError(f"{process.args!r} said {line!r} instead of {word}; see its error above")
    return line


def _go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def _cpu_s(process: "subprocess.Popen[str]") -> float:
    """CPU time of a program and all that it started, those that ended included: webdataset starts a curl for each
    shard."""
    root = psutil.Process(process.pid)
    return sum(sum(one.cpu_times()[:4]) for one in (root, *root.children(recursive=True)))


def _rows(found: dict[str, list[Epoch | None]], needed: int, count: int) -> Iterator[Row]:
    for rival in RIVALS:
        if rival.name not in found:
            yield Row(rival.name, "not installed: --install does", "", None)
            continue
        pairs = [(epoch, ours) for epoch, ours in zip(found[rival.name], found[OURS], strict=True) if epoch and ours]
        failed = len(found[rival.name]) - len(pairs)
        said = f"; {failed} of {len(found[rival.name])} epochs ended with an error" if failed else ""
        name = f"{rival.name}: one epoch of {count} images, {SHARDS} shards of {needed / SHARDS / 1e6:.0f} MB"
        if not pairs:
            yield Row(name, said.removeprefix("; "), "", None)
            continue
        epochs = [epoch for epoch, _ in pairs]
        ratio = statistics.median(epoch.cpu_ms / ours.cpu_ms for epoch, ours in pairs)
        lost = count - min(epoch.images for epoch in epochs)
        yield Row(
            name,
            f"CPU of an image {ratio:.2f} x ours; {_median(epochs, 'sent_bytes') / needed:.2f} bytes for each, "
            f"{_median(epochs, 'requests') / (needed / (4 << 20)):.2f} requests for 4 MiB, first batch after "
            f"{_median(epochs, 'first_s'):.1f} s" + (f"; {lost} images were not delivered" if lost else "") + said,
            "",
            None,
        )


def _median(epochs: list[Epoch], what: str) -> float:
    values: list[float] = [getattr(epoch, what) for epoch in epochs]
    return statistics.median(values)
