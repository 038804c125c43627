#!/usr/bin/env python
"""Shards in an object store: bytes and requests for each byte that is needed, and CPU time beside local disk.

Bytes and requests are those of the server's own caches over a store in memory: windows of 8 shards, as jobs read them
in either order version, two epochs, one to eight servers that own blocks together, with caches for 1.25 windows, read
ahead along the plan. CPU time is
that of this process, which reads and decodes photographs from a store on loopback with a delay for each request, in
turn with the same photographs on disk; the store is another process. The last rows stand beside MosaicML Streaming and
webdataset (`benchmarks/stored_rivals.py`). The exit code is 1 on a miss.
"""

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench_formats import draw_images, write
from benchmarks.calibration import slowdown
from benchmarks.rows import Row, report, spread
from benchmarks.shuffles import Shape, order_of, table_of
from benchmarks.stored_rivals import RIVALS, rows_beside_rivals, store_of
from loaders.installing import install

from dataserver.dataset import BLOCK_BYTES, BLOCKS, BlockKey, Blocks, Dataset, ImageRef, Piece, Source, build_index
from dataserver.dataset.storage.client_interface import ObjectInfo
from dataserver.images import ImageShape, decode_patches
from dataserver.jobs.read_ahead import ReadAhead
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.gathering import gather_window
from dataserver.planning.stream.grids import patch_grid
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.samples import ROW_BITS, ShardTable
from dataserver.planning.stream.sliding import PARTS
from dataserver.serving.block_cache_config import needed_bytes

WINDOW: Final = 8
"""Shards that are mixed, as a job's `shuffle_window`."""
BATCH: Final = 512
"""Images of a step, which the servers share."""
PER_NEEDED: Final = 1.1
PER_4_MIB: Final = 1.0
"""Requests for each 4 MiB that are needed."""
PEAK: Final = 2.5
"""Bytes that are read in any step behind the first window, over the mean."""
CPU_RATIO: Final = 1.15
DELAY_S: Final = 0.03
"""Time that each request is held back."""
ROUND_TRIPS: Final = 20
FACTOR: Final = 1.5
"""A first batch may take so many times that of local disk, and so many round trips."""


@dataclass
class CountingStore:
    """A store of shards full of zeros."""

    name: str = "s3://bench"
    requests: int = 0
    num_bytes: int = 0

    def get(self, wanted: ObjectInfo, start: int, length: int) -> bytes:
        """Return zeros for a range, and count the request."""
        assert start + length <= wanted.num_bytes
        self.requests += 1
        self.num_bytes += length
        return bytes(length)


@dataclass
class Fleet:
    """Servers that own blocks together."""

    store: CountingStore
    servers: dict[int, Blocks] = field(default_factory=dict)

    def join(self, number: int, cache_bytes: int) -> None:
        """Add a server to the fleet."""
        blocks = Blocks()
        blocks.configure(cache_bytes)
        self.servers[number] = blocks
        self._meet()

    def leave(self, number: int) -> None:
        """Take a server from the fleet."""
        del self.servers[number]
        self._meet()

    def _meet(self) -> None:
        for number, blocks in self.servers.items():
            blocks.use_owners(_Owners(self, number) if len(self.servers) > 1 else None)

    def settle(self) -> None:
        """Wait for blocks on their way: the store is faster than the trainers."""
        while any(blocks._loading for blocks in self.servers.values()):
            time.sleep(0.001)


@cache
def _weight(server: int, shard: str, block: int) -> bytes:
    return hashlib.sha256(f"{server} {shard} {block}".encode()).digest()


@dataclass
class _Owners:
    """What one server knows of the others."""

    fleet: Fleet
    own: int

    def owner(self, key: BlockKey) -> Any:
        best = max(self.fleet.servers, key=lambda number: _weight(number, key.info.key, key.number))
        return None if best == self.own else best

    def fetch(self, owner: Any, pieces: Sequence[Piece]) -> list[bytes]:
        return self.fleet.servers[owner].read(pieces, for_peer=True)


@dataclass(frozen=True)
class StoredShards:
    """A dataset of equal shards in the store, as far as reading ahead looks at it."""

    store: CountingStore
    infos: list[ObjectInfo]
    reads_ahead: bool = True

    def blocks(self, shard: int, low: int, high: int) -> list[tuple[BlockKey, Source]]:
        """Return the blocks of a part of a shard, as `Dataset.blocks` does."""
        info = self.infos[shard]
        first, last = info.num_bytes * low // PARTS, -(-info.num_bytes * high // PARTS)
        numbers = range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
        return [(BlockKey(self.store.name, info, number), self.store) for number in numbers]


@dataclass(frozen=True)
class Steps:
    """The steps of a job over equal shards."""

    order: StreamOrder
    tables: list[ShardTable]

    @classmethod
    def of(cls, shape: Shape, share: float, version: int) -> "Steps":
        """Those of a filter that keeps a share of the images, in an order version."""
        rng = np.random.default_rng(shape.seed)
        rows = [np.flatnonzero(rng.random(shape.samples) < share) for _ in range(shape.shards)]
        return cls(order_of(shape, version, np.array([len(row) for row in rows])), [table_of(row) for row in rows])

    def images(self, step: int) -> list[tuple[int, int]]:
        """Shard and image of each sample of a step."""
        found = list[tuple[int, int]]()
        for span in self.order.spans(step):
            window = gather_window(self.order, span, [self.tables[shard] for shard in span.shards])
            number = window.part(span)[0].astype(np.int64)
            found += zip((number >> ROW_BITS).tolist(), (number & ((1 << ROW_BITS) - 1)).tolist(), strict=True)
        return found


@dataclass(frozen=True)
class Case:
    """One run over the caches."""

    name: str
    servers: int
    share: float = 1.0
    """Share of the images that a filter keeps."""
    version: int = 2
    """Value of `order_version` in the job."""
    joins: bool = False
    """One server joins in the middle, and another one leaves later."""
    has_target: bool = False


CASES: Final = (
    Case("1 server", 1, has_target=True),
    Case("2 servers", 2, has_target=True),
    Case("4 servers", 4, has_target=True),
    Case("4 servers, order_version 1", 4, version=1),
    Case("8 servers", 8),
    Case("4 servers, one joins, one leaves", 4, joins=True),
    Case("4 servers, a filter that keeps 30 %", 4, share=0.3),
)


def cache_rows(shape: Shape, image_bytes: int) -> list[Row]:
    """Bytes and requests of all cases."""
    rows = []
    for case in CASES:
        store, steps = CountingStore(), Steps.of(shape, case.share, case.version)
        needed, read = through_caches(case, shape, steps, store, image_bytes)
        ratio, requests = store.num_bytes / needed, store.requests / (needed / (4 << 20))
        most = max(read[WINDOW * shape.samples // BATCH :]) / (store.num_bytes / len(read))
        what = f"{case.name}, {shape.shards} shards of {shape.samples * image_bytes / 1e6:.0f} MB"
        goals = (f"<= {PER_NEEDED}", f"<= {PER_4_MIB:.0f}") if case.has_target else ("", "")
        reached = (ratio <= PER_NEEDED, requests <= PER_4_MIB) if case.has_target else (None, None)
        rows.append(Row(f"bytes read per byte needed, {what}", f"{ratio:.2f}", goals[0], reached[0]))
        rows.append(Row(f"requests per 4 MiB needed, {what}", f"{requests:.2f}", goals[1], reached[1]))
        even = (f"<= {PEAK}", most <= PEAK) if case.has_target else ("", None)
        rows.append(Row(f"most bytes read in a step, over the mean, {what}", f"{most:.1f}", *even))
    return rows


def through_caches(
    case: Case, shape: Shape, steps: Steps, store: CountingStore, image_bytes: int
) -> tuple[int, list[int]]:
    """Read all steps by the servers of a case. Returns the bytes needed, and those read from the store in each step."""
    shard_bytes = shape.samples * image_bytes
    fleet, cache_bytes = Fleet(store), needed_bytes(WINDOW * shard_bytes, case.servers)
    for number in range(case.servers):
        fleet.join(number, cache_bytes)
    shards = StoredShards(store, [ObjectInfo(f"{n}.tar", shard_bytes, "v", 0) for n in range(shape.shards)])
    needed, read, num_steps = 0, list[int](), steps.order.num_steps
    for step in range(num_steps):
        if case.joins and step == num_steps // 3:
            fleet.join(case.servers, cache_bytes)
        if case.joins and step == 2 * num_steps // 3:
            fleet.leave(0)
        before, images = store.num_bytes, steps.images(step)
        for at, blocks in enumerate(fleet.servers.values()):
            ReadAhead("bench", steps.order, [shards], blocks).tell(step)
            mine = images[at :: len(fleet.servers)]
            pieces = [Piece(store, shards.infos[s], i * image_bytes, image_bytes) for s, i in mine]
            needed += sum(piece.length for piece in pieces)
            blocks.read_ahead(pieces)
            blocks.read(pieces)
        fleet.settle()
        read.append(store.num_bytes - before)
    return needed, read


def decode(dataset: Dataset, refs: Sequence[ImageRef]) -> None:
    """Read images, as a server does that knows them beforehand, and decode them."""
    sizing = Sizing()
    for first in range(0, len(refs), 32):
        some = refs[first : first + 32]
        if dataset.reads_ahead:
            dataset.read_ahead(refs[first : first + 96])
        for ref in some:
            rows, columns = patch_grid(ref.width, ref.height, sizing)
            out = np.empty((rows * columns, sizing.patch**2 * 3), np.uint8)
            assert decode_patches(dataset.read(ref), ImageShape(*ref[3:6], rows, columns), sizing, out)


def cpu_rows(count: int, width: int, rounds: int, seed: int) -> list[Row]:
    """CPU time of an image, and time to the first batch, beside local disk."""
    images = draw_images(count, width, seed)
    what = f"{count} images of {sum(map(len, images)) / count / 1e3:.0f} KB"
    with tempfile.TemporaryDirectory() as root:
        local = write(Path(root), images)["tar"]
        build_index(local, workers=1)
        with store_of(local, DELAY_S) as store:
            url = f"{store.address}/bucket/shards/0.tar"
            index_dir = Path(root) / "index"
            build_index(Path(url), index_dir, workers=1)
            order = np.random.default_rng(seed).permutation(count).tolist()
            cpu: dict[str, list[float]] = {"local": [], "store": []}
            first: dict[str, list[float]] = {"local": [], "store": []}
            for number in range(rounds + 1):
                for name in cpu:
                    BLOCKS.forget()
                    dataset = Dataset.open(local) if name == "local" else Dataset.open(Path(url), index_dir)
                    refs = [dataset.shards[0].image(row, 0) for row in order]
                    began, wall = time.process_time(), time.perf_counter()
                    decode(dataset, refs[:32])
                    first[name].append(time.perf_counter() - wall)
                    decode(dataset, refs[32:])
                    cpu[name].append(time.process_time() - began)
                    if not number:  # what is loaded at first counts for neither
                        cpu[name].clear()
                        first[name].clear()
    ratios = [store / disk for store, disk in zip(cpu["store"], cpu["local"], strict=True)]
    median = statistics.median(ratios)
    most = FACTOR * statistics.median(first["local"]) + ROUND_TRIPS * DELAY_S * max(1.0, slowdown())
    began = statistics.median(first["store"])
    return [
        Row(
            f"CPU per image, store / local disk, {what}", spread(ratios, ".3f"), f"<= {CPU_RATIO}", median <= CPU_RATIO
        ),
        Row(f"seconds to a first batch of 32, {what}", f"{began:.2f}", f"<= {most:.2f}", began <= most),
    ]


def _all_rows(shards: int, images: int, rounds: int, seed: int) -> Iterator[list[Row]]:
    for count, size, draw in ((images, 77_000, seed), (images // 2, 120_000, seed + 1)):
        yield cache_rows(Shape(shards, count, WINDOW, BATCH, draw), size)
    for count, width, draw in ((400, 512, seed), (300, 768, seed + 1)):
        yield cpu_rows(count, width, rounds, draw)
    yield rows_beside_rivals(1500, rounds, seed, DELAY_S)


def main() -> int:
    """Measure caches and stores, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=64, help="of the caches' rows (default 64, eight windows)")
    parser.add_argument("--images", type=int, default=1000, help="in each of them (default 1000)")
    parser.add_argument("--rounds", type=int, default=5, help="of the CPU rows (default 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--install", action="store_true", help="install the rivals that want packages of their own")
    arguments = parser.parse_args()
    if arguments.install:
        for environment in (rival.environment for rival in RIVALS if rival.environment is not None):
            install(environment)
    shards, images, seed = arguments.shards, arguments.images, arguments.seed
    print(f"blocks of {BLOCK_BYTES >> 20} MiB, {DELAY_S * 1e3:.0f} ms for each request")
    rows = []
    for made in _all_rows(shards, images, arguments.rounds, seed):
        rows += made
        for row in made:  # before the table, which a failure of later rows would take with it
            print(f"{row.name}: {row.measured}", flush=True)
    return report(rows)


if __name__ == "__main__":
    sys.exit(main())
