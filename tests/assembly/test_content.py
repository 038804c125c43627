"""The content digest, and real photographs."""

import hashlib
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from images.pictures import decode
from PIL import Image

from dataserver.assembly import content_digest, digest
from dataserver.assembly.digest import SIZINGS, built_in_images
from dataserver.dataset import Dataset, build_index
from dataserver.images import ImageShape, decode_patches
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.grids import patch_grid


def test_the_images_of_the_digest_are_the_same_in_every_release() -> None:
    """Else servers of two releases would disagree that decode alike. Without loss, whatever library reads them."""
    pixels = hashlib.sha256()
    for data, _ in built_in_images():
        if data.startswith(b"\x89PNG") and data.endswith(b"IEND\xaeB`\x82"):  # cut ones are the beginnings of these
            with Image.open(io.BytesIO(data)) as image:
                pixels.update(f"{image.mode} {image.size} ".encode() + image.tobytes())
    assert pixels.hexdigest()[:16] == "552f534800fbd076"
    others = [data for data, shape in built_in_images() if data[:4] != b"\x89PNG" and not shape.may_be_truncated]
    encoded = [hashlib.sha256(data).hexdigest() for data in others]
    assert hashlib.sha256(" ".join(encoded).encode()).hexdigest()[:16] == "f0db9c67f0ebed7e"


def test_the_digest_is_the_same_in_another_process() -> None:
    script = "from dataserver.assembly import content_digest; print(content_digest())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == content_digest()
    assert len(bytes.fromhex(content_digest())) == 32


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("TEXTS", ("a dog",)),
        ("built_in_images", lambda: iter(())),
        ("RESAMPLED", ""),
        ("TRANSFORMED", ""),
        ("TILED", ""),
    ],
)
def test_the_digest_is_of_images_texts_and_filters(monkeypatch: pytest.MonkeyPatch, name: str, other: object) -> None:
    before = content_digest()
    monkeypatch.setattr(digest, name, other)
    assert content_digest() != before


def test_transforms_that_compute_colours_make_the_bytes_that_are_known() -> None:
    assert digest._transformed() == digest.TRANSFORMED


def test_tiles_are_the_bytes_that_are_known() -> None:
    assert digest._tiled() == digest.TILED


def test_the_built_in_images_decode_except_those_that_are_cut_and_may_not_be() -> None:
    pictures = list(built_in_images())
    results = [decode(data, shape, SIZINGS[0]) for data, shape in pictures]
    cut = [i for i, (valid, _) in enumerate(results) if not valid]
    assert cut == [2, 17]
    assert not any(pictures[i][1].may_be_truncated for i in cut)
    assert len({patches.tobytes() for valid, patches in results if valid}) == len(pictures) - 2 > 10


def test_neither_torch_nor_grpc_is_imported() -> None:
    script = "import dataserver.assembly, dataserver.images, sys; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_photographs_of_laion_mini_decode(shared_data: Path, tmp_path: Path) -> None:
    sizing = Sizing(patch=14, merge=2, max_patches=256)
    folder = shared_data / "laion-mini"
    build_index(folder, tmp_path, workers=2)
    dataset = Dataset.open(folder, tmp_path)
    errors = []
    num_images = 0
    for shard in dataset.shards:
        for row in range(shard.num_samples):
            ref = shard.image(row, 0)
            data = dataset.read(ref)
            rows, columns = patch_grid(ref.width, ref.height, sizing)
            out = np.zeros((rows * columns, 14 * 14 * 3), np.uint8)
            assert decode_patches(data, ImageShape(ref.width, ref.height, ref.orientation, rows, columns), sizing, out)
            num_images += 1
            if num_images % 20 == 0 and ref.orientation == 1:
                errors.append(mean_difference(data, out, rows, columns))
    assert num_images == 1760
    assert max(errors) < 3.0


def mean_difference(data: bytes, patches: np.ndarray, rows: int, columns: int) -> float:
    """Difference of the mean colour from Pillow's own full decode."""
    image = Image.open(io.BytesIO(data))
    rgba = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(rgba)
    reference = np.asarray(white.convert("RGB").resize((columns * 14, rows * 14)))
    return float(np.abs(reference.mean((0, 1)) - patches.reshape(-1, 3).mean(0)).max())
