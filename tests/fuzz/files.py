"""What is tried on files, and the process that tries it: little memory, little time, and only our own errors.

Started as `python -m fuzz.files TARGET FOLDER SECONDS SEED [INPUT...]`. Tries the inputs, and then mutations of the
target's seeds for that long. What is being tried lies in FOLDER/trying, so that it is known where the process dies.
"""

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from fuzz.mutation import Fuzzing, mutated
from odd_shards.images import IMAGES
from odd_shards.samples import SAMPLES
from odd_shards.shards import SHARDS, make_shard
from odd_shards.tars import BLOCK, mended
from shards import write_interleaved, write_pairs, write_tar, write_texts

from dataserver.dataset import Dataset, DatasetError, Quarantine, build_index, count_tokens, lint
from dataserver.dataset.descriptions import describe
from dataserver.dataset.errors import SampleError
from dataserver.dataset.headers import read_header
from dataserver.dataset.shard import ImageRef
from dataserver.planning.jobspec import Sizing
from dataserver.preprocessing import ByteTokenizer, ImageShape, decode_patches, silence_pillow_warnings, undecodable

MEMORY_BYTES: Final = 5 << 30
"""Of address space: the largest image takes about 2 GiB, and libraries reserve more than they use."""
ATTEMPT_S: Final = 60
"""For one input, on a machine that has other things to do."""
MAX_SEED_BYTES: Final = 100_000

SIZINGS: Final = (Sizing(patch=4, merge=1, max_patches=64), Sizing(patch=14, merge=2, max_patches=64))


@dataclass(frozen=True)
class Target:
    """Something that reads a file."""

    seeds: Callable[[Path], list[bytes]]
    """Makes known inputs, in an empty folder."""
    attempt: Callable[[Path, bytes], None]
    """Tries one, in an empty folder; raises what no user may see."""


def _use(folder: Path) -> None:
    """Index a dataset and read all that jobs, views and lint read of it."""
    build_index(folder, workers=1)
    lint(folder, judge=undecodable)
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
            counts = shard.token_counts(ByteTokenizer.digest)
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
    headers = [at for at in range(0, len(data) - BLOCK + 1, BLOCK) if data[at + 257 : at + 262] == b"ustar"]
    for shard in (data, b"".join(_mended(data, headers))):
        (folder / "0.tar").write_bytes(shard)
        _use(folder)


def _mended(data: bytes, headers: list[int]) -> Iterator[bytes]:
    end = 0
    for at in headers:
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
    _use(folder)
    assert Dataset.open(folder).shards[0].num_samples == 3


def _image(_folder: Path, data: bytes) -> None:
    """The verdict is the same in every grid and every time, and zeros where it is bad."""
    try:
        header = read_header(data)
    except SampleError:
        return
    reason = undecodable(data, ImageRef(0, 0, len(data), header.width, header.height, header.orientation))
    for sizing in SIZINGS:
        rows = columns = sizing.merge * 2
        shape = ImageShape(header.width, header.height, header.orientation, rows, columns)
        out = np.full((rows * columns, sizing.patch**2 * 3), 171, np.uint8)
        assert decode_patches(data, shape, sizing, out) == (reason is None), reason
        assert reason is None or not out.any()


def _index(name: str) -> Callable[[Path, bytes], None]:
    """Tries a file beside the shard of `_indexed`."""

    def attempt(folder: Path, data: bytes) -> None:
        _indexed(folder)
        next(folder.glob(name)).write_bytes(data)
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
    "tar": Target(_tars, _tar),
    "parquet": Target(_parquets, _parquet),
    "json": Target(_members("json"), _member("json")),
    "txt": Target(_members("txt"), _member("txt")),
    "image": Target(_images, _image),
    "image member": Target(_images, _member("jpg")),
    "index": Target(lambda folder: [next(_indexed(folder).glob("*.index")).read_bytes()], _index("*.index")),
    "tokens": Target(lambda folder: [next(_indexed(folder).glob("*.tokens-*")).read_bytes()], _index("*.tokens-*")),
    "quarantine": Target(lambda _: [b'["0.tar", "0"]\n["a/1.tar", "\\u00e4"]\n'], _quarantine),
}


def main(target: str, folder: Path, seconds: float, seed: int, inputs: list[Path]) -> None:
    """Try the inputs, and then mutations; ends with an exception, or by a signal, at what should not be."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    silence_pillow_warnings()
    tried = TARGETS[target]
    for file in inputs:
        _try(tried, folder, file.read_bytes())
    seeds = [data for data in tried.seeds(_emptied(folder / "seeds")) if len(data) <= MAX_SEED_BYTES]
    count = 0
    for numbers in Fuzzing(seconds, seed).numbers():
        _try(tried, folder, mutated(numbers.choice(seeds), seeds, numbers))
        count += 1
    sys.stdout.write(str(count))


def _try(target: Target, folder: Path, data: bytes) -> None:
    (folder / "trying").write_bytes(data)
    signal.alarm(ATTEMPT_S)
    target.attempt(_emptied(folder / "attempt"), data)
    signal.alarm(0)


def _emptied(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), [Path(name) for name in sys.argv[5:]])
