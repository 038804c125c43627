"""Samples as a loader of one's own makes them: patches, and a caption behind the tokens that stand for the image.

Decoding is shared with the loaders of `bench_serving.py`, and counts as nobody's code.
"""

import io
import tarfile
from pathlib import Path

import numpy as np
from loaders.common import DECODERS, U8, Files, Place, grid, read
from numpy.typing import NDArray
from PIL import Image

from adapter_loops.measuring import SEQ_LEN

Sample = dict[str, NDArray[np.int32] | U8]
"""`tokens`, int32 [T], and `patches`, uint8 [P, 588]."""
MERGE = 4
"""Patches that become one token."""
IMAGE = 256
"""Token that stands for patches; captions are bytes."""


def sample(decoder: str, jpg: bytes, txt: bytes) -> Sample:
    """One sample, cut to `SEQ_LEN` tokens."""
    patches = DECODERS[decoder](jpg)
    tokens = np.concatenate([np.full(len(patches) // MERGE, IMAGE, np.int32), np.frombuffer(txt, np.uint8)])
    return {"tokens": tokens[:SEQ_LEN].astype(np.int32), "patches": patches}


class Images:
    """The samples of some shards, by number."""

    def __init__(self, folder: Path, decoder: str) -> None:
        self.decoder = decoder
        self.files: Files = {}
        self.places: list[tuple[Place, Place]] = []
        for shard in sorted(folder.glob("*.tar")):
            with tarfile.open(shard) as tar:
                found = {m.name: (shard, m.offset_data, m.size) for m in tar}
            names = sorted(name.removesuffix(".jpg") for name in found if name.endswith(".jpg"))
            self.places += [(found[f"{name}.jpg"], found[f"{name}.txt"]) for name in names]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Sample:
        jpg, txt = self.places[i]
        return sample(self.decoder, read(self.files, jpg), read(self.files, txt))


def lengths(images: Images) -> list[int]:
    """Tokens of each sample, from headers alone."""
    found = []
    for jpg, (_, _, text) in images.places:
        columns, rows = grid(*Image.open(io.BytesIO(read(images.files, jpg))).size)
        found.append(min(SEQ_LEN, columns * rows + text))
    return found
