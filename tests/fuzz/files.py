"""What is tried on files, and the process that tries it: little memory, little time, and only our own errors."""

import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import numpy as np
from fuzz.odd_bytes import harmed, headers, odd_tars
from fuzz.odd_values import odd_arrays, odd_arrows, odd_json, odd_lines, odd_parquets
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from odd_shards.images import IMAGES
from odd_shards.samples import SAMPLES
from odd_shards.shards import SHARDS, make_shard
from odd_shards.tars import BLOCK, mended
from shards import write_interleaved, write_pairs, write_tar, write_texts

from dataserver.assembly import ByteTokenizer
from dataserver.dataset import Dataset, DatasetError, IndexRules, Quarantine, TextOnly, build_index, count_tokens, lint
from dataserver.dataset.descriptions import describe
from dataserver.dataset.shard import ImageRef
from dataserver.images import (
    ImageHeaderError,
    ImageShape,
    decode_patches,
    fault_of,
    read_header,
    silence_pillow_warnings,
)
from dataserver.planning.job.fields import Sizing

MEMORY_BYTES: Final = 5 << 30
"""Of address space: the largest image takes about 2 GiB, and libraries reserve more than they use."""
ATTEMPT_S: Final = 60
"""For one input, on a machine that has other things to do."""
MAX_SEED_BYTES: Final = 100_000

QUARANTINE: Final = b'["0.tar", "0"]\n["a/1.tar", "\\u00e4"]\n'
SIZINGS: Final = (Sizing(patch=4, merge=1, max_patches=64), Sizing(patch=14, merge=2, max_patches=64))


@dataclass(frozen=True)
class Target:
    """Something that reads a file."""

    seeds: Callable[[Path], list[bytes]]
    """Makes known inputs, in an empty folder."""
    attempt: Callable[[Path, bytes], None]
    """Tries one, in an empty folder; raises what no user may see."""
    odd: Callable[[bytes], SearchStrategy[bytes]] = lambda _: st.nothing()
    """What is odd in the words of its format, made of a known input."""

    def inputs(self, folder: Path) -> SearchStrategy[bytes]:
        """Known inputs, which are made in an empty folder, changed in the words of their format or harmed."""
        known = [data for data in self.seeds(folder) if len(data) <= MAX_SEED_BYTES]
        return st.one_of([self.odd(data) for data in known]) | harmed(known)


def _use(folder: Path) -> None:
    """Index a dataset and read all that jobs, views and lint read of it."""
    build_index(folder, workers=1, rules=IndexRules(TextOnly.ALLOW))
    lint(folder, judge=fault_of)
    _read(folder)


@contextmanager
def _only_our_errors() -> Iterator[None]:
    """Ours are one printable line."""
    try:
        yield
    except DatasetError as error:
        if not str(error).isprintable():
            raise


def _read(folder: Path) -> None:
    with _only_our_errors():
        dataset = Dataset.open(folder)
        count_tokens(folder, ByteTokenizer())
        for shard in dataset.shards:
            assert len(shard.keys()) == shard.num_samples
            counts = shard.tokens.counts(ByteTokenizer.digest)
            assert len(counts) == len(shard.sizes().text_bytes)
            for name in shard.columns:
                assert len(shard.column(name)) == shard.num_samples
            list(describe(dataset, [(shard.position, row) for row in range(shard.num_samples)]))
            for row in range(shard.num_samples):
                assert len(shard.document(row, ByteTokenizer.digest).kinds) == len(shard.parts(row).kinds)
                for i in range(int(np.diff(shard.sizes().image_offsets)[row])):
                    dataset.read(shard.image(row, i))


def _tar(folder: Path, data: bytes) -> None:
    """As it is, and with the checksums of its headers put right, without which little of it is read."""
    for shard in (data, b"".join(_mended(data))):
        (folder / "0.tar").write_bytes(shard)
        _use(folder)


def _mended(data: bytes) -> Iterator[bytes]:
    end = 0
    for at in headers(data):
        yield data[end:at]
        yield mended(data[at : at + BLOCK])
        end = at + BLOCK
    yield data[end:]


def _member(extension: str) -> Callable[[Path, bytes], None]:
    """Tries a member beside good ones."""
    good = IMAGES["grey JPEG"](np.random.default_rng(0)).members

    def attempt(folder: Path, data: bytes) -> None:
        others = [(f"0.{name}", content) for name, content in good if name != extension]
        write_tar(folder / "0.tar", [(f"0.{extension}", data), *others, ("1.txt", b"good")])
        _use(folder)
        assert Dataset.open(folder).shards[0].keys()[-1] == "1"

    return attempt


def _parquet(folder: Path, data: bytes) -> None:
    write_texts(folder, 3, 3)
    (folder / "00000.parquet").write_bytes(data)
    try:
        _use(folder)
    except DatasetError as error:
        if "belongs to a sample of its tar" not in str(error) or not str(error).isprintable():
            raise
    else:
        assert Dataset.open(folder).shards[0].num_samples == 3


def _image(_folder: Path, data: bytes) -> None:
    """The verdict is the same in every grid and every time, and zeros where it is bad."""
    try:
        header = read_header(data)
    except ImageHeaderError:
        return
    for may_be_truncated in (False, True):
        of = header.width, header.height, header.orientation
        fault = fault_of(data, ImageRef(0, 0, len(data), *of, may_be_truncated))
        is_served = fault is None or fault.is_served
        for sizing in SIZINGS:
            rows = columns = sizing.merge * 2
            out = np.full((rows * columns, sizing.patch**2 * 3), 171, np.uint8)
            shape = ImageShape(*of, rows, columns, may_be_truncated)
            assert decode_patches(data, shape, sizing, out) == is_served, fault
            assert is_served or not out.any()


def _files(name: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [next(_indexed(folder).glob(name)).read_bytes()]


def _file(name: str) -> Callable[[Path, bytes], None]:
    """Tries a file beside the shard of `_indexed`."""

    def attempt(folder: Path, data: bytes) -> None:
        _indexed(folder)
        next(folder.glob(name)).write_bytes(data)
        for other in {*folder.glob("*.numeric")} - {*folder.glob(name)}:  # so that the index's columns are read
            other.unlink()
        _read(folder)
        with _only_our_errors():
            lint(folder)

    return attempt


def _indexed(folder: Path) -> Path:
    write_interleaved(folder, 3, 3, median_size=24)
    write_pairs(folder, 3, 3, median_size=24)
    build_index(folder, workers=1)
    count_tokens(folder, ByteTokenizer())
    return folder


def _quarantine(folder: Path, data: bytes) -> None:
    (folder / "list").write_bytes(data)
    with _only_our_errors():
        loaded = Quarantine.load(folder / "list")
        loaded.save(folder / "copy")
        assert Quarantine.load(folder / "copy").digest == loaded.digest


def _tars(folder: Path) -> list[bytes]:
    tars = [make_shard(name, 0).content for name in SHARDS if name != "mixture"]
    return [*tars, (write_pairs(folder, 3, 3, median_size=24) / "00000.tar").read_bytes()]


def _members(extension: str) -> Callable[[Path], list[bytes]]:
    def seeds(_folder: Path) -> list[bytes]:
        odd = [make(np.random.default_rng(0), "0") for make in SAMPLES.values()]
        return [content for sample in odd for name, content in sample.members if name == extension]

    return seeds


def _images(_folder: Path) -> list[bytes]:
    return [make(np.random.default_rng(0)).members[0][1] for make in IMAGES.values()]


def _parquets(folder: Path) -> list[bytes]:
    sidecars = [make_shard(name, 0).sidecar for name in SHARDS]
    return [*filter(None, sidecars), (write_pairs(folder, 3, 3) / "00000.parquet").read_bytes()]


TARGETS: Final = {
    "tar": Target(_tars, _tar, odd_tars),
    "parquet": Target(_parquets, _parquet, odd_parquets),
    "json": Target(_members("json"), _member("json"), odd_json),
    "txt": Target(_members("txt"), _member("txt")),
    "image": Target(_images, _image),
    "image member": Target(_images, _member("jpg")),
    "index": Target(_files("*.index"), _file("*.index"), odd_arrows),
    "numeric": Target(_files("*.numeric"), _file("*.numeric"), odd_arrays),
    "tokens": Target(_files("*.tokens-*"), _file("*.tokens-*"), odd_arrows),
    "summary": Target(_files("*.summary"), _file("*.summary"), odd_arrays),
    "quarantine": Target(lambda _: [QUARANTINE], _quarantine, odd_lines),
}


class Worker:
    """A process with little memory that tries files; another one when it dies."""

    def __init__(self, folder: Path) -> None:
        """Work in a folder of its own."""
        self._folder = folder
        self._pool = self._started()

    def attempt(self, target: str, data: bytes) -> None:
        """Try a file; raises what no user may see, or AssertionError where the process dies of it."""
        try:
            self._pool.submit(_try, target, self._folder, data).result()
        except BrokenProcessPool:
            self._pool = self._started()
            raise AssertionError(f"ends the process: a crash, or over {ATTEMPT_S} s") from None

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, get_context("spawn"), _limit)


def _limit() -> None:
    """What numpy warns of would be a wrong number: it is an error here."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("error", RuntimeWarning)
    silence_pillow_warnings()


def _try(target: str, folder: Path, data: bytes) -> None:
    signal.alarm(ATTEMPT_S)
    try:
        TARGETS[target].attempt(emptied(folder), data)
    finally:
        signal.alarm(0)


def emptied(folder: Path) -> Path:
    """The folder, made if need be, without its files."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder
