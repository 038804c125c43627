"""Images of any aspect are cut into tiles with little memory."""

import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
from images.pictures import join_patches, noise
from PIL import Image

from dataserver.images import ImageShape, decode_patches
from dataserver.images.tiles import GREY, write_tiles
from dataserver.planning.job.fields import Sizing
from dataserver.planning.stream.grids import image_layouts, stacked_grids

SIDE = 28
OF_SIDE = {"rule": "tiles", "patch": 14, "merge": 1, "side": SIDE}
CHOICES: dict[str, dict[str, Any]] = {
    "pinpoints": {"choice": "pinpoints", "grids": [[1, 2], [2, 1], [2, 2]], "max_tiles": 9},
    "aspect": {"choice": "aspect", "min_tiles": 1, "max_tiles": 12},
    "edge": {"choice": "edge", "longest_edge": 4 * SIDE},
}


def sizing_of(choice: str, resampling: str = "lanczos") -> Sizing:
    return Sizing.model_validate({**OF_SIDE, "resampling": resampling, "tiles": CHOICES[choice]})


@pytest.mark.parametrize("size", [(1_000_000, 1), (1, 1_000_000)])
@pytest.mark.parametrize("lone", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
def test_the_longest_images_take_little_memory(choice: str, lone: bool, size: tuple[int, int]) -> None:
    file, sizing = io.BytesIO(), sizing_of(choice)
    Image.new("1", size, 1).save(file, "PNG")
    layouts = image_layouts(*np.array(size)[:, None], np.array([lone]), sizing)
    assert layouts is not None
    rows, columns = (int(side[0]) for side in stacked_grids(layouts, sizing))
    out = np.zeros((rows * columns, 14 * 14 * 3), np.uint8)
    shape = ImageShape(*size, 1, rows, columns, tiles=(int(layouts[0, 0]), int(layouts[0, 1])))
    tracemalloc.start()
    assert decode_patches(file.getvalue(), shape, sizing, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
    assert out.any()


@pytest.mark.parametrize("resampling", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("size", [(1, 1), (28, 28), (9, 5), (13, 300), (301, 12), (640, 479), (40, 39)])
def test_one_of_several_images_is_a_grey_square_that_is_scaled(size: tuple[int, int], resampling: str) -> None:
    sizing = sizing_of("pinpoints", resampling)
    picture, longest = noise("RGB", *size), max(size)
    out = np.empty((4, 14 * 14 * 3), np.uint8)
    write_tiles(np.asarray(picture), size, size, (0, 0), sizing, out)
    square = Image.new("RGB", (longest, longest), GREY)
    square.paste(picture, ((longest - size[0]) // 2, (longest - size[1]) // 2))
    expected = np.asarray(square.resize((SIDE, SIDE), Image.Resampling[resampling.upper()]), np.int64)
    assert np.abs(join_patches(out, 2, 2, 14, 1) - expected).max() <= 1


def test_a_transformed_image_fills_what_the_plan_has_embeddings_of() -> None:
    """The plan knows the size before the transforms, and leaves the borders of that out."""
    sizing, planned = sizing_of("pinpoints"), (560, 280)
    layouts = image_layouts(*np.array(planned)[:, None], np.array([True]), sizing)
    assert layouts is not None
    assert layouts[0, :4].tolist() == [1, 2, 2, 4], "no borders"
    out = np.empty((12, 14 * 14 * 3), np.uint8)
    write_tiles(np.full((300, 300, 3), 200, np.uint8), (300, 300), planned, (1, 2), sizing, out)
    assert (out == 200).all()
