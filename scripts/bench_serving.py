#!/usr/bin/env python
"""CPU time of an image from shard to tensor: this service beside loaders that decode in the trainer's own processes.

All read the same shards and make the same batches, and all but ours and TensorFlow share one decode function
(scripts/loaders). In every round each runs once, in another order; CPU time is that of all its processes, workers,
servers and consumer, between a warm-up and the end. Ratios are to the floor: as many serial loops at once as there are
cores, since busy cores slow each other down. A first batch is counted from the start of the programs, but for the rows
of this service's start, whose client runs already. On one machine this service shares memory with its client; rows of
what is sent over TCP are those of clients elsewhere, but for the network: payloads go over data connections, and in
rows of their own over gRPC alone. Some rivals want packages of their own: --install puts them under build/loaders, and
those that are not there are named. --seed 1 --median 384 is its held-out variant. After each round the table of all
rounds so far is printed, so that a run that is cut keeps it. The exit code is 1 if a target is missed.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from benchmarks.rows import Row, report, show
from benchmarks.tiny_images import tiny_row
from loaders.installing import install, python_of
from loaders.reporting import PREPARE

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to load images."""

    name: str
    program: str
    """Module in `scripts/loaders` that runs it."""
    option: str
    """Name of the decode function, or of the views."""
    copies: int = 1
    """Processes that run at once."""
    target: float | None = None
    """Most CPU time of an image, as a share of the floor's."""
    environment: str | None = None
    """Virtual environment of its own; it reads a copy of the shards in a format of its own then."""
    cores: int | None = None
    """It runs on; all by default."""
    ours: float | None = None
    """Least CPU time of an image, in times of that of our encoder view."""


SERIAL, FLOOR = "serial loop", "serial loops, one for each core"
ENCODER, ALL = "this service, encoder view", "this service, views of three modules"
SENT, SENT_ALL = f"{ENCODER}, sent over TCP", "this service, three views, sent over TCP"
PROTOTYPE, TCP_PROTOTYPE = "gRPC prototype", "TCP prototype"
DATALOADER = "torch DataLoader, 2 workers"
SERIAL_ALONE = "serial loop, on one core"
ENCODER_ALONE, SENT_ALONE = f"{ENCODER}, on one core", f"{SENT}, on one core"
CONTENDERS = (
    Contender(SERIAL, "serial", "fast"),
    Contender(FLOOR, "serial", "fast", copies=len(os.sched_getaffinity(0))),
    Contender(ENCODER, "service", "encoder", target=1.10),
    Contender(ALL, "service", "all", target=1.25),
    Contender(SENT, "service", "encoder-sent"),
    Contender(SENT_ALL, "service", "all-sent", target=1.35),
    Contender("this service, encoder view, sent over gRPC alone", "service", "encoder-grpc"),
    Contender("this service, three views, sent over gRPC alone", "service", "all-grpc"),
    Contender("this service, encoder view, sent over TCP with TLS", "service", "encoder-sent-tls", target=1.6),
    Contender("this service, encoder view, sent over gRPC alone with TLS", "service", "encoder-grpc-tls"),
    Contender(SERIAL_ALONE, "serial", "fast", cores=1),
    Contender(ENCODER_ALONE, "service", "encoder", cores=1),
    Contender(SENT_ALONE, "service", "encoder-sent", cores=1),
    Contender(PROTOTYPE, "grpc_prototype", "fast"),
    Contender(TCP_PROTOTYPE, "tcp_prototype", "fast"),
    Contender(DATALOADER, "dataloader", "fast", ours=1 / 1.05),
    Contender("webdataset, 2 workers", "webdataset_loader", "fast"),
    Contender("MosaicML Streaming, 2 workers", "mosaic", "fast", environment="mosaic"),
    Contender("Megatron-Energon, 2 workers", "energon", "fast", environment="energon", ours=1 / 1.05),
    Contender("tf.data service, uncompressed", "tfdata_service", "none", environment="tensorflow", ours=1.3),
    Contender("tf.data service, default compression", "tfdata_service", "auto", environment="tensorflow", ours=1.65),
    Contender("torch DataLoader, 2 workers, plain Pillow", "dataloader", "plain", ours=3.5),
)
SERVER_MB, CLIENT_MB = 500, 300
"""Most memory with default budgets."""
SENT_OF_FLOOR, SENT_OF_PROTOTYPE, SENT_OF_LOADER = 1.25, 1.08, 0.9
"""Most CPU time of an image of the encoder view that is sent, over that of others."""
CLIENT_CPU = 0.12
"""Most CPU time of an image in a client that is sent it, over that of a serial loop."""
WARM_S = 2.0
"""Most seconds from the start of a server to the first batch in a client that runs, where all kernels are compiled."""
SCALING = 0.95
"""Least gain from one core to all, over that of serial loops."""
LIBRARIES, SERVER = "import numpy, grpc", "import dataserver.serving.server"
IMPORT = 2.0
"""Most CPU time of importing a server, over that of the libraries."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a contender."""

    cpu_ms: float
    """CPU time for an image, of all processes together."""
    consumer_cpu_ms: float
    """CPU time for an image in the processes that the batches end up in: what a GPU node pays."""
    images_per_s: float
    consumer_mb: float
    """PSS of the processes that the batches end up in: pages that processes share count once."""
    others_mb: float
    """PSS of their workers and servers."""
    first_s: float
    """Time from the start of its programs to the first batch."""


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def program(contender: Contender) -> list[str]:
    """Return the command that starts a contender."""
    python = sys.executable if contender.environment is None else python_of(contender.environment)
    return [str(python), "-m", f"loaders.{contender.program}"]


def prepare(contender: Contender, shards: Path) -> None:
    """Make the copy of the shards that a contender reads."""
    if contender.environment is not None:
        print(f"{contender.name}: making its copy of the shards", flush=True)
        line = [*program(contender), str(shards), "0", PREPARE]
        subprocess.run(line, check=True, env=ENVIRONMENT, capture_output=True)


@dataclass(frozen=True, slots=True)
class Started:
    """One start of a server."""

    listening_s: float
    first_s: float
    """Time until the first batch in a client that ran already."""
    cpu_s: float
    """CPU time of the server and what it started, until then."""


def start(shards: Path, kernels: Path | None) -> Started:
    """Start a server for a client that runs, with compiled kernels in a folder of its own if one is given."""
    environment = ENVIRONMENT if kernels is None else {**ENVIRONMENT, "NUMBA_CACHE_DIR": str(kernels)}
    line = [sys.executable, "-m", "loaders.service_start", str(shards)]
    done = subprocess.run(line, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return Started(*map(float, done.stdout.split()))


def import_cpu_s(line: str) -> float:
    """CPU time of a process that runs one line and ends; what it imports is compiled to bytecode."""
    code = f"{line}\nimport time; print(time.process_time())"
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE)
    return float(done.stdout)


def run(contender: Contender, shards: Path, count: int) -> Measured:
    """Run a contender once, over `count` images in each copy."""
    command = [*program(contender), str(shards), str(count), contender.option]
    if contender.cores is not None:
        command = ["taskset", "-c", f"0-{contender.cores - 1}", *command]
    began = time.perf_counter()
    copies = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if contender.environment else None,  # TensorFlow says much
            text=True,
            env=ENVIRONMENT,
        )
        for _ in range(contender.copies)
    ]
    try:
        _expect(copies, "first")
        first_s = time.perf_counter() - began
        _go_on(copies)
        _expect(copies, "begin")
        started, cpu, consumers = time.perf_counter(), _cpu_s(copies), _own_cpu_s(copies)
        _go_on(copies)
        images = sum(int(line.split()[1]) for line in _expect(copies, "end"))
        cpu, wall_s = _cpu_s(copies) - cpu, time.perf_counter() - started
        consumers = _own_cpu_s(copies) - consumers
        consumer_mb, others_mb = _pss_mb(copies)
        _go_on(copies)
        for copy in copies:
            copy.wait(30)
    finally:
        for copy in copies:
            for process in _tree([copy]):
                process.kill()
            copy.wait()
    return Measured(cpu / images * 1e3, consumers / images * 1e3, images / wall_s, consumer_mb, others_mb, first_s)


def _expect(copies: list["subprocess.Popen[str]"], word: str) -> list[str]:
    lines = []
    for copy in copies:
        assert copy.stdout is not None
        line = copy.stdout.readline()
        if not line.startswith(word):
            raise SystemExit(f"{copy.args!r} said {line!r} instead of {word}; see its error above")
        lines.append(line)
    return lines


def _go_on(copies: list["subprocess.Popen[str]"]) -> None:
    for copy in copies:
        assert copy.stdin is not None
        copy.stdin.write("\n")
        copy.stdin.flush()


def _tree(copies: list["subprocess.Popen[str]"]) -> list[psutil.Process]:
    found = []
    for copy in copies:
        if copy.poll() is None:
            process = psutil.Process(copy.pid)
            found += [process, *process.children(recursive=True)]
    return found


def _cpu_s(copies: list["subprocess.Popen[str]"]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in _tree(copies))


def _own_cpu_s(copies: list["subprocess.Popen[str]"]) -> float:
    """CPU time of the programs themselves, without the processes that they started."""
    return sum(sum(psutil.Process(copy.pid).cpu_times()[:2]) for copy in copies if copy.poll() is None)


def _pss_mb(copies: list["subprocess.Popen[str]"]) -> tuple[float, float]:
    """PSS of the programs themselves, and of the processes that they started."""
    roots = {copy.pid for copy in copies}
    found = {process.pid: process.memory_full_info().pss / 1e6 for process in _tree(copies)}
    consumers = sum(mb for pid, mb in found.items() if pid in roots)
    return consumers, sum(found.values()) - consumers


def rows(found: dict[str, list[Measured]]) -> Iterator[Row]:
    """Ratios are medians over rounds of ratios within a round."""

    def ratio(name: str, base: str) -> float:
        pairs = zip(found[name], found[base], strict=True)
        return statistics.median(ours.cpu_ms / other.cpu_ms for ours, other in pairs)

    def median(name: str, what: str) -> float:
        values: list[float] = [getattr(run, what) for run in found[name]]
        return statistics.median(values)

    for contender in CONTENDERS:
        name = contender.name
        if name not in found:
            yield Row(name, "not installed: --install does", "", None)
            continue
        of_floor = ratio(name, FLOOR)
        yield Row(
            name,
            f"{of_floor:.2f} x the floor, {ratio(name, SERIAL):.2f} x serial; {median(name, 'cpu_ms'):.2f} ms CPU, "
            f"{median(name, 'images_per_s'):.0f} images/s, consumer {median(name, 'consumer_mb'):.0f} MB, others "
            f"{median(name, 'others_mb'):.0f} MB, first batch {median(name, 'first_s'):.1f} s",
            "" if contender.target is None else f"<= {contender.target} x the floor",
            None if contender.target is None else of_floor <= contender.target,
        )
    for contender in CONTENDERS:
        if contender.ours is not None and contender.name in found:
            times = ratio(contender.name, ENCODER)
            reached = times >= contender.ours
            yield Row(f"{contender.name}, over ours", f"{times:.2f} x", f">= {contender.ours:.2f} x", reached)
    yield from rows_of_sent(ratio)
    for name in (ENCODER, SENT):
        consumer_ms = statistics.median(
            mine.consumer_cpu_ms / serial.cpu_ms for mine, serial in zip(found[name], found[SERIAL], strict=True)
        )
        shown = Row(f"{name}: CPU time of the client, over serial", f"{consumer_ms:.3f} x", "", None)
        if name == SENT:
            shown = replace(shown, target=f"<= {CLIENT_CPU} x", reached=consumer_ms <= CLIENT_CPU)
        yield shown
    for name in (ENCODER, ALL, SENT):
        yield Row(f"{name}, over the {PROTOTYPE}", f"{ratio(name, PROTOTYPE):.2f} x", "", None)
        for what, most, who in (("others_mb", SERVER_MB, "server"), ("consumer_mb", CLIENT_MB, "client")):
            mb = median(name, what)
            yield Row(f"{name}: memory of the {who}", f"{mb:.0f} MB", f"<= {most} MB", mb <= most)
    for name, alone in ((ENCODER, ENCODER_ALONE), (SENT, SENT_ALONE)):
        yield row_of_cores(name, *(found[one] for one in (name, alone, FLOOR, SERIAL_ALONE)))


def row_of_cores(
    name: str, ours: list[Measured], alone: list[Measured], loops: list[Measured], loop: list[Measured]
) -> Row:
    """What a contender gains from one core to all, over what serial loops gain.

    Args:
        name: of the contender.
        ours, alone: it, on all cores and on one.
        loops, loop: serial loops on all cores, and one on one.
    """
    gain = statistics.median(
        both.images_per_s / one.images_per_s / (floor.images_per_s / serial.images_per_s)
        for both, one, floor, serial in zip(ours, alone, loops, loop, strict=True)
    )
    title = f"{name}: one core to all, over what serial loops gain"
    return Row(title, f"{gain:.2f} x", f">= {SCALING} x", gain >= SCALING)


def rows_of_sent(ratio: Callable[[str, str], float]) -> Iterator[Row]:
    """What is sent to other machines, beside the floor or the prototype, whichever is easier to compare with here.

    Args:
        ratio: of the CPU times of two contenders.
    """
    of_floor, of_prototype = ratio(SENT, FLOOR), ratio(SENT, TCP_PROTOTYPE)
    yield Row(
        f"{SENT}: over the floor, or over the {TCP_PROTOTYPE}",
        f"{of_floor:.2f} x, {of_prototype:.2f} x",
        f"<= {SENT_OF_FLOOR} x the floor or <= {SENT_OF_PROTOTYPE} x the prototype",
        of_floor <= SENT_OF_FLOOR or of_prototype <= SENT_OF_PROTOTYPE,
    )
    of_loader = ratio(SENT, DATALOADER)
    yield Row(f"{SENT}: over {DATALOADER}", f"{of_loader:.2f} x", f"<= {SENT_OF_LOADER} x", of_loader <= SENT_OF_LOADER)


def rows_of_starts(warm: list[Started], cold: Started) -> Iterator[Row]:
    """Yield the rows of a server's start, from medians."""
    first_s, listening_s, cpu_s = (
        statistics.median(getattr(one, what) for one in warm) for what in ("first_s", "listening_s", "cpu_s")
    )
    yield Row(
        "a server's start to the first batch in a running client, warm",
        f"{first_s:.2f} s; listening after {listening_s:.2f} s; {cpu_s:.2f} s CPU of the server",
        f"<= {WARM_S} s",
        first_s <= WARM_S,
    )
    yield Row(
        "the same, cold: on a machine that has compiled nothing",
        f"{cold.first_s:.1f} s; listening after {cold.listening_s:.1f} s; {cold.cpu_s:.1f} s CPU",
        "",
        None,
    )


def row_of_imports(times: list[tuple[float, float]]) -> Row:
    """CPU times of importing a server and of the libraries; the ratio is a median over pairs."""
    ratio = statistics.median(server / libraries for server, libraries in times)
    name = "CPU time of importing a server, over numpy and grpc"
    return Row(name, f"{ratio:.2f} x", f"<= {IMPORT} x", ratio <= IMPORT)


def main() -> int:
    """Measure all contenders, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1500, help="in the shards (default 1500)")
    parser.add_argument("--count", type=int, default=3000, help="images of a run (default 3000)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the images")
    parser.add_argument("--median", type=int, default=512, help="their width in pixels (default 512)")
    parser.add_argument("--install", action="store_true", help="install the rivals that want packages of their own")
    arguments = parser.parse_args()
    if arguments.install:
        for environment in dict.fromkeys(c.environment for c in CONTENDERS if c.environment is not None):
            install(environment)
    contenders = [c for c in CONTENDERS if c.environment is None or python_of(c.environment) is not None]
    found: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        drawn = ["--seed", str(arguments.seed), "--median", str(arguments.median)]
        options = ["--samples", str(arguments.images), "--shards", "6", *drawn]
        make = [sys.executable, str(HERE / "fixtures" / "make_demo_shards.py"), str(shards), *options]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(
            [sys.executable, "-m", "dataserver", "index", str(shards)], check=True, stdout=subprocess.DEVNULL
        )
        for contender in {c.environment: c for c in contenders}.values():
            prepare(contender, shards)
        cold, warm = start(shards, Path(folder) / "kernels"), [start(shards, None)]
        imports: list[tuple[float, float]] = []
        tiny = tiny_row(arguments.rounds)
        for number in range(arguments.rounds):
            warm.append(start(shards, None))
            imports += [(import_cpu_s(SERVER), import_cpu_s(LIBRARIES)) for _ in range(3)]
            for contender in random.Random(number).sample(contenders, len(contenders)):
                found[contender.name].append(run(contender, shards, arguments.count))
                print(f"round {number + 1}: {contender.name}: {found[contender.name][-1].cpu_ms:.2f} ms", flush=True)
            made = [*rows(found), *rows_of_starts(warm[1:], cold), row_of_imports(imports), tiny]
            show(made, f"after {number + 1} of {arguments.rounds} rounds")
    return report(made)


if __name__ == "__main__":
    sys.exit(main())
