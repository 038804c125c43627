"""Shards that are odd, hostile or broken as a whole."""

import gzip
import io
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from odd_shards.images import HEAVY as HEAVY_IMAGES
from odd_shards.images import IMAGES, Rng, jpeg
from odd_shards.samples import HEAVY as HEAVY_SAMPLES
from odd_shards.samples import SAMPLES
from odd_shards.tars import BLOCK, FORMATS, Tar, mended, pax_header, plain_header
from odd_shards.verdicts import CAPTION, LEFT_OUT, PAIR, SERVED, TEXT, Odd


@dataclass
class OddShard:
    """A shard and what must be said of it."""

    content: bytes = b""
    sidecar: bytes | None = None
    samples: dict[str, Odd] = field(default_factory=dict)
    """By key, as they must be judged; what the tar does not show of a sample stands in none of them."""
    kinds: list[str] = field(default_factory=list)
    """What lint must say of the shard, with no key."""
    names: dict[str, str] = field(default_factory=dict)
    """By key: what the samples of a mixture are called in `IMAGES` or `SAMPLES`."""
    has_columns: bool = False
    """Whether filters have something to compare: of a sidecar, or of .json members."""

    def say(self, key: str, form: str = PAIR, verdict: str = SERVED, kinds: Sequence[str] = ()) -> None:
        """Expect a sample."""
        self.samples[key] = Odd((), verdict, tuple(kinds), form)


Maker = Callable[[Rng], OddShard]


def mixture(rng: Rng, light: bool = False) -> OddShard:
    """Every odd image and every odd sample once, in any order, in any format, in any folder.

    Args:
        rng: draws all that is not said here.
        light: without those that take long.
    """
    shard, tar = OddShard(has_columns=True), Tar(FORMATS[rng.integers(3)])
    folder = ("", "./", "a/b.c/", "\u00e4/", "d" * 60 + "/")[rng.integers(5)]
    names = [name for name in (*IMAGES, *SAMPLES) if not light or name not in HEAVY_IMAGES | HEAVY_SAMPLES]
    for n, i in enumerate(rng.permutation(len(names))):
        key = f"{folder}{n:03d}"
        name = names[i]
        odd = IMAGES[name](rng) if name in IMAGES else SAMPLES[name](rng, f"{n:03d}")
        tar.add_all(key, odd.members)
        shard.samples[key.removeprefix("./")] = odd
        shard.names[key.removeprefix("./")] = name
    tar.add("000again.txt", CAPTION)  # another key, not a repeated one
    shard.say("000again", TEXT)
    tar.add(f"{folder}001.txt", CAPTION)
    repeated = f"{folder}001".removeprefix("./")
    first = shard.samples[repeated]
    shard.samples[repeated] = replace(first, kinds=(*first.kinds, "duplicate_key"))
    shard.content = tar.whole()
    return shard


def hostile_members(rng: Rng) -> OddShard:
    """Links, devices, folders, sparse files, and names that leave the tar, between good samples."""
    shard, tar = OddShard(), Tar(FORMATS[rng.integers(2)])
    for n, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)):
        tar.add(f"link{n}.jpg", b"", kind, linkname="/etc/passwd")
        tar.add(f"link{n}.txt", CAPTION)
        shard.say(f"link{n}", verdict=LEFT_OUT, kinds=["special_member", "needs_special_member"])
    tar.add("folder.jpg", b"", tarfile.DIRTYPE)
    sparse = mended(plain_header("sparse.jpg", 100, b"S"), more=(482, b"\1"))
    tar.add_raw("sparse.jpg", sparse + bytes(BLOCK), rng.bytes(100))
    tar.add("sparse.txt", CAPTION)
    shard.say("sparse", verdict=LEFT_OUT, kinds=["special_member", "needs_special_member"])
    mapped = pax_header([("GNU.sparse.major", "1"), ("GNU.sparse.name", "mapped.jpg"), ("GNU.sparse.realsize", "9")])
    tar.add_raw("mapped.jpg", mapped + plain_header("GNUSparseFile.0/mapped.jpg", BLOCK), bytes(BLOCK))
    tar.add("mapped.txt", CAPTION)
    shard.say("mapped", verdict=LEFT_OUT, kinds=["special_member", "needs_special_member"])
    too_long = "n" * 1100 + ".txt"
    for name in ("/etc/passwd.txt", "../up.txt", "a/../../up.txt", "line\nbreak.txt", "bell\a.txt", too_long):
        tar.add(name, CAPTION)
        shard.kinds.append("unsafe_name")
    tar.add_raw("", mended(plain_header("x", 0), name=(0, b"\xff\xfe.txt")), b"")
    shard.kinds.append("unsafe_name")
    for name in ("README", ".hidden.txt", "folder/.hidden", "._0.jpg", "folder/0001"):
        tar.add(name, b"no sample")
    shard.kinds.append("unused_part")  # the two that are not hidden
    tar.add("plain.jpg", jpeg(rng))
    tar.add("plain.txt", CAPTION)
    shard.say("plain")
    shard.content = tar.whole()
    return shard


def overrides(rng: Rng) -> OddShard:
    """PAX headers that rename and resize members, long names, numbers in base 256, and headers that are too large."""
    shard, tar = OddShard(), Tar()
    tar.add_raw("renamed.txt", pax_header([("path", "renamed.txt")]) + plain_header("other.txt", 5), b"words")
    shard.say("renamed", TEXT)
    tar.add_raw("sized.txt", pax_header([("size", "13"), ("comment", "=\n")]) + plain_header("sized.txt", 0), CAPTION)
    shard.say("sized", TEXT)
    size = (1 << 95 | len(CAPTION)).to_bytes(12, "big")
    tar.add_raw("base256.txt", mended(plain_header("base256.txt", 0), size=(124, size)), CAPTION)
    shard.say("base256", TEXT)
    long = "long" + "g" * 300
    tar.tar_format = FORMATS[rng.integers(2)]
    tar.add(f"{long}.txt", CAPTION)
    shard.say(long, TEXT)
    huge = 65 * 1024
    tar.add_raw("", plain_header("huge", huge, tarfile.XHDTYPE), rng.bytes(huge))
    tar.add_raw("hidden.txt", plain_header("hidden.txt", 5), b"words")
    shard.kinds.append("extension_too_large")
    tar.add("last.txt", CAPTION)
    shard.say("last", TEXT)
    shard.content = tar.whole()
    return shard


def _pairs(rng: Rng, count: int) -> tuple[Tar, list[str]]:
    """Good pairs of three members each, as img2dataset writes them."""
    tar, keys = Tar(FORMATS[rng.integers(3)]), [f"{n:05d}" for n in range(count)]
    for key in keys:
        tar.add_all(key, (("jpg", jpeg(rng)), ("json", b'{"score": 1}'), ("txt", CAPTION)))
    return tar, keys


CUTS = ("header", "extension", "data", "text", "padding", "later header", "between members", "end")


def cut_tar(rng: Rng, where: str) -> OddShard:
    """A tar that ends within a sample, at one of `CUTS`; the samples before it are whole."""
    shard = OddShard(has_columns=True)
    tar, keys = _pairs(rng, int(rng.integers(3, 7)))
    victim = int(rng.integers(1, len(keys)))
    first, second, last = tar.places[3 * victim : 3 * victim + 3]
    known = True
    match where:
        case "header":  # its checksum is lost with everything after it
            end, known = first.header + int(rng.integers(1, 148)), False
        case "extension":
            end, known = first.start, False
        case "data":
            end = first.data + int(rng.integers(1, first.end - first.data))
        case "text":
            end = last.data + int(rng.integers(1, last.end - last.data))
        case "padding":  # of the last member: the sample is whole
            victim, end, known = victim + 1, last.end, False
        case "later header":  # of a member whose name is lost: only the first member of its sample is there
            end = second.header + int(rng.integers(1, 148))
        case "between members":
            end = second.start
        case _:  # nothing is missing but the end-of-archive marker
            victim, end, known = len(keys), len(tar.content), False
    for key in keys[:victim]:
        shard.say(key)
    if known:
        shard.say(keys[victim], verdict=LEFT_OUT, kinds=["cut_tar"])
    else:
        shard.kinds.append("cut_tar")
    shard.content = bytes(tar.content[:end])
    return shard


def corrupt_tar(rng: Rng) -> OddShard:
    """A header in the middle is overwritten: what comes after it cannot be found."""
    shard = OddShard(kinds=["corrupt_tar"], has_columns=True)
    tar, keys = _pairs(rng, 5)
    victim = int(rng.integers(1, 5))
    place = tar.places[3 * victim]
    tar.content[place.start : place.start + BLOCK] = rng.bytes(BLOCK)
    for key in keys[:victim]:
        shard.say(key)
    shard.content = tar.whole()
    return shard


def absurd_size(_rng: Rng) -> OddShard:
    """A member that declares eight gigabytes."""
    shard, tar = OddShard(), Tar()
    tar.add("good.txt", CAPTION)
    shard.say("good", TEXT)
    tar.add_raw("absurd.txt", mended(plain_header("absurd.txt", 0), size=(124, b"77777777777\0")), b"")
    shard.say("absurd", verdict=LEFT_OUT, kinds=["cut_tar"])
    shard.content = tar.whole()
    return shard


def _table(content: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(content, buffer)
    return buffer.getvalue()


def with_sidecar(rng: Rng) -> OddShard:
    """A sidecar that has an image for a sample that the tar has as text; a row twice, and rows without a sample."""
    shard, tar = OddShard(kinds=["row_without_sample"] * 2, has_columns=True), Tar()
    for n in range(6):
        tar.add_all(f"{n}", ((("jpg", jpeg(rng)),) if n % 3 else ()) + (("txt", CAPTION),))
        shard.say(f"{n}", PAIR if n % 3 else TEXT, kinds=["lost_image"] if n == 3 else [])
    sizes = pa.array([None, 640, 640, 640, 640, 640, 7, 640], pa.int32())
    keys = ["0", "1", "2", "3", "4", "5", "5", "unknown"]
    shard.sidecar = _table(pa.table({"key": keys, "width": sizes, "height": sizes, "score": rng.random(8)}))
    shard.content = tar.whole()
    return shard


def bad_sidecar(rng: Rng, how: str) -> OddShard:
    """A sidecar that cannot be used; the samples can."""
    shard, tar = OddShard(), Tar()
    tar.add_all("0", (("jpg", jpeg(rng)), ("txt", CAPTION)))
    shard.say("0")
    shard.content = tar.whole()
    shard.kinds.append({"wide": "too_many_columns", "not UTF-8": "unusable_column"}.get(how, "bad_sidecar"))
    good = _table(pa.table({"key": ["0"], "score": [1]}))
    not_utf8 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
    shard.sidecar = {
        "garbage": rng.bytes(400),
        "empty": b"",
        "cut": good[: len(good) - 20],
        "no key": _table(pa.table({"score": [1]})),
        "key of numbers": _table(pa.table({"key": [0], "score": [1]})),
        "not UTF-8": _table(pa.table({"key": ["0"], "text": not_utf8})),
        "wide": _table(pa.table({"key": ["0"], **{f"c{n:03d}": [n] for n in range(300)}})),
    }[how]
    return shard


BAD_SIDECARS = ("garbage", "empty", "cut", "no key", "key of numbers", "not UTF-8", "wide")


def _fixed(content: bytes, *kinds: str) -> Maker:
    return lambda _rng: OddShard(content, kinds=list(kinds))


def joined_tars(rng: Rng) -> OddShard:
    """A second tar after the first, as `cat` makes it: GNU tar would need --ignore-zeros to see it."""
    shard, tar, second = OddShard(), Tar(), Tar()
    tar.add("0.txt", CAPTION)
    second.add("1.txt", CAPTION)
    shard.say("0", TEXT)
    shard.say("1", TEXT)
    shard.content = tar.whole() + bytes(BLOCK * int(rng.integers(20))) + second.whole()
    return shard


def trailing_data(rng: Rng) -> OddShard:
    """Bytes after a tar that are none."""
    shard, tar = OddShard(kinds=["trailing_data"]), Tar()
    tar.add("0.txt", CAPTION)
    shard.say("0", TEXT)
    shard.content = tar.whole() + b"no tar" + rng.bytes(900)
    return shard


def compressed(rng: Rng) -> OddShard:
    """A tar that gzip compressed, under the name of a tar."""
    tar = Tar()
    tar.add("0.txt", rng.bytes(3000))
    return OddShard(gzip.compress(tar.whole(), mtime=0), kinds=["corrupt_tar"])


def wide_names(rng: Rng) -> OddShard:
    """Names with spaces of all widths, joiners and soft hyphens, as files of people have them."""
    shard, tar = OddShard(), Tar()
    for name in ("shot\u3000a", "shot\u00a0b", "shot\u202fc", "so\u00adft", "joi\u200dner"):
        tar.add_all(name, (("jpg", jpeg(rng)), ("txt", CAPTION)))
        shard.say(name)
    shard.content = tar.whole()
    return shard


def spellings(rng: Rng) -> OddShard:
    """Pairs whose halves are called alike to people: they differ in case, or in the form of Unicode."""
    shard, tar = OddShard(), Tar()
    halves = [("caf\u00e9", "cafe\u0301"), ("Shot", "shot"), ("\u00c5ngstr\u00f6m", "a\u030angstro\u0308m")]
    for text, image in halves:
        members = [(f"{text}.txt", CAPTION), (f"{image}.jpg", jpeg(rng))]
        for name, content in members if rng.integers(2) else members[::-1]:
            tar.add(name, content)
        shard.say(text, TEXT)
        shard.say(image, verdict=LEFT_OUT, kinds=["missing_caption"])
    shard.content = tar.whole()
    return shard


FILES: dict[str, Callable[[Rng], bytes]] = {
    "unread/beside.tar.gz": lambda rng: gzip.compress(rng.bytes(100), mtime=0),
    "unread/tar_without_suffix": lambda rng: joined_tars(rng).content,
    "unread/beside.tgz": lambda rng: rng.bytes(100),
    "unread/beside.tar.zst": lambda rng: rng.bytes(100),
    "unread/beside.TAR": lambda rng: rng.bytes(100),
    "unread/beside.jsonl": lambda rng: b'{"caption": "a"}\n' * int(rng.integers(5)),
    "unread/alone.parquet": lambda rng: _table(pa.table({"key": ["0"], "score": rng.random(1)})),
}
"""By name: files that look like shards or their metadata, and are not read."""
COPIES = {"wide_names_copy": "wide_names"}
"""Shards that have the bytes of another one."""


SHARDS: dict[str, Maker] = {
    "mixture": mixture,
    "hostile_members": hostile_members,
    "overrides": overrides,
    "corrupt": corrupt_tar,
    "absurd_size": absurd_size,
    "sidecar": with_sidecar,
    "trailing": trailing_data,
    "joined": joined_tars,
    "compressed": compressed,
    "wide_names": wide_names,
    "spellings": spellings,
    "nothing": _fixed(b"", "cut_tar"),
    "no_members": _fixed(bytes(10_240)),
    "no_tar": _fixed(b"This is not a tar. " * 60, "corrupt_tar"),
    **{f"cut_{where.replace(' ', '_')}": partial(cut_tar, where=where) for where in CUTS},
    **{f"sidecar_{how.replace(' ', '_')}": partial(bad_sidecar, how=how) for how in BAD_SIDECARS},
}
"""By name: makes such a shard."""


def make_shard(name: str, seed: int, light: bool = False) -> OddShard:
    """The shard of that name; the same bytes for the same seed.

    Args:
        name: of `SHARDS`.
        seed: another one makes another shard.
        light: without samples that take long.
    """
    rng = np.random.default_rng([seed, list(SHARDS).index(name)])
    return mixture(rng, light=True) if light and name == "mixture" else SHARDS[name](rng)


def make_file(name: str, seed: int) -> bytes:
    """The file of that name, of `FILES`."""
    return FILES[name](np.random.default_rng([seed, list(FILES).index(name)]))
