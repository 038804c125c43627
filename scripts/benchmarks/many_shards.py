"""A dataset of very many shards, made of a few: what lies beside the distinct ones is linked under many names.

Tars are sparse files of the right size without a byte in them, so that nothing can be decoded; all that indexing,
opening, creating jobs, planning and token ids need is there. A link changes the time of the file it leads to, and an
index is known to be that of its tar only for the time that it has then: so all tars are linked first, and it is noted.
"""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from dataserver.assembly import load_tokenizer
from dataserver.dataset import count_tokens
from dataserver.dataset.errors import Findings
from dataserver.dataset.index.columns import CORE_SCHEMA, IMAGE_TYPE
from dataserver.dataset.index.format import BATCH_ROWS, FORMAT_VERSION, NO_SIDECAR, IndexHeader, read_schema
from dataserver.dataset.index.indexing import write_index
from dataserver.dataset.index.known import state_of, write_known
from dataserver.dataset.index.rules import DEFAULT_RULES, LoneTexts, written_rules
from dataserver.dataset.shards.listing import find_shards

IMAGE_BYTES: Final = 60_000
"""Size of a sample's image, as in LAION at 512 pixels."""
MEDIAN_WIDTH: Final = 512
TICK_S: Final = 0.05
"""Longer than file systems take to count the next time."""
WORDS: Final = (
    "a photo of an old red boat on the river near two men and a dog in soft morning light with blurred background "
    "original print framed poster free shipping high resolution stock texture detail close up"
).split()
Step = Callable[[str], object]


def make_dataset(
    folder: Path,
    shards: int,
    samples: int,
    distinct: int,
    say: Step = lambda _: None,
    *,
    seed: int = 0,
    median: int = MEDIAN_WIDTH,
) -> Path:
    """Make `shards` shards of `samples` image-text pairs each; `distinct` of them differ.

    Args:
        folder: must not hold shards yet.
        shards: how many names there are, up to 65,000 for each distinct one.
        samples: of each shard.
        distinct: how many indexes are made.
        say: told what is done now.
        seed: of all that is drawn.
        median: width of an image, in pixels.
    """
    originals = folder.with_name(f"{folder.name}-distinct")
    originals.mkdir(parents=True)
    folder.mkdir(parents=True)
    tar = originals / f"{0:06d}.tar"
    with tar.open("wb") as file:
        file.truncate(samples * (IMAGE_BYTES + 2048))
    for number in range(1, distinct):
        os.link(tar, originals / f"{number:06d}.tar")
    time.sleep(TICK_S)
    for number in range(distinct):
        say(f"index {number + 1} of {distinct}")
        _write_index(originals / f"{number:06d}.tar", samples, number + distinct * seed, median)
    _note_known(originals)
    say("token ids")
    count_tokens(originals, load_tokenizer("bytes"))
    say("links")
    link_shards(originals, folder, shards)
    return folder


def link_shards(originals: Path, folder: Path, count: int) -> None:
    """Give the indexed shards of a folder `count` names in another one that exists, in turn."""
    tars = sorted(originals.glob("*.tar"))
    names = [f"{number:06d}" for number in range(count)]
    for number, name in enumerate(names):
        tar = tars[number % len(tars)]
        os.link(tar, folder / f"{name}.tar")
        if (sidecar := tar.with_suffix(".parquet")).exists():
            os.link(sidecar, folder / f"{name}.parquet")
    time.sleep(TICK_S)
    _note_known(originals)
    suffixes = [p.name.removeprefix(tars[0].name) for p in originals.glob(f"{tars[0].name}.*")]
    for number, name in enumerate(names):
        for suffix in suffixes:
            os.link(f"{tars[number % len(tars)]}{suffix}", folder / f"{name}.tar{suffix}")


def _note_known(folder: Path) -> None:
    """Note that the shards of a folder are as their indexes say, which is not so where they are made up."""
    for shard in find_shards(folder):
        write_known(shard.index_path, read_schema(shard.index_path)[0], state_of(shard.etags()))


def _write_index(tar: Path, samples: int, seed: int, median: int) -> None:
    """The index of a tar of pairs: widths log-normal around the median, captions of 2 to 300 words."""
    rng = np.random.default_rng(seed)
    width = np.clip(median * np.exp(rng.normal(0.05, 0.6, samples)), 96, 3000).astype(np.int32)
    height = np.clip(width / np.exp(rng.normal(0.2, 0.35, samples)), 96, 3000).astype(np.int32)
    words = np.clip(np.exp(rng.normal(2.4, 0.9, samples)), 2, 300).astype(int)
    vocabulary = np.array(WORDS)
    texts = [" ".join(vocabulary[rng.integers(0, len(WORDS), n)].tolist()) for n in words]
    one = np.arange(samples + 1, dtype=np.int32)
    fields = {
        "offset": np.arange(samples, dtype=np.int64) * (IMAGE_BYTES + 2048) + 512,
        "length": np.full(samples, IMAGE_BYTES, np.int64),
        "width": width,
        "height": height,
        "orientation": np.ones(samples, np.uint8),
        "format": np.zeros(samples, np.uint8),
    }
    images = pa.StructArray.from_arrays([pa.array(fields[f.name], f.type) for f in IMAGE_TYPE], fields=[*IMAGE_TYPE])
    core = pa.RecordBatch.from_arrays(
        [
            pa.array([f"{seed:05d}{row:05d}" for row in range(samples)]),
            pa.ListArray.from_arrays(2 * one, pa.array(np.tile(np.array([1, 0], np.uint8), samples))),
            pa.ListArray.from_arrays(one, pa.array(np.array([len(t) for t in texts], np.int32))),
            pa.ListArray.from_arrays(one, pa.array(texts)),
            pa.ListArray.from_arrays(one, images),
        ],
        schema=CORE_SCHEMA,
    )
    columns = pa.table({"punsafe": rng.random(samples), "similarity": rng.random(samples)})
    header = IndexHeader(
        format_version=FORMAT_VERSION,
        shard_bytes=tar.stat().st_size,
        sidecar_bytes=NO_SIDECAR,
        sha256=hashlib.sha256(f"tar {tar.name}".encode()).hexdigest(),
        sidecar_sha256="",
        columns_digest=hashlib.sha256(f"{seed} {samples} {median}".encode()).hexdigest(),
        num_samples=samples,
        rules=written_rules(LoneTexts.LEFT_OUT, DEFAULT_RULES),
        has_images=True,
    )
    batches = [_compact(core.slice(start, BATCH_ROWS)) for start in range(0, samples, BATCH_ROWS)]
    write_index(tar.with_name(f"{tar.name}.index"), header, Findings(), batches, columns)


def _compact(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows that share no buffer with others, as a shard's reader makes them."""
    return pa.Table.from_batches([rows]).take(pa.array(np.arange(rows.num_rows))).combine_chunks().to_batches()[0]
