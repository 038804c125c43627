"""Rows of images that are cut into tiles, in the order in which LLaVA-OneVision lays them out."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def rows_with_ends(rows: Tensor, layouts: Tensor, cells: int, end: Tensor) -> Tensor:
    """Rows of the picture of the whole, and then of all tiles side by side, each line with a row for its end.

    Args:
        rows: [K * cells^2, width], of the parts of all images one after the other, the whole first.
        layouts: integers [images, 6], the tensor `tiles` of a view (protos/disttrain/v1/microbatch.proto).
        cells: rows and columns of a part.
        end: [width], learned.

    Raises:
        ValueError: there are not as many parts as the layouts have.
    """
    found, at = [rows[:0]], 0
    for layout in layouts.tolist():
        count = (1 + layout[0] * layout[1]) * cells**2
        found += _of_image(rows[at : at + count], layout, cells, end)
        at += count
    if at != len(rows):
        raise ValueError(f"found {len(rows)} rows of parts; {at} are required by the layouts of {len(layouts)} images")
    return torch.cat(found)


def _of_image(rows: Tensor, layout: list[int], cells: int, end: Tensor) -> Iterator[Tensor]:
    down, across, left_rows, left_columns, scaled_rows, scaled_columns = layout
    yield rows[: cells**2]
    if not down * across:
        yield end[None]
        return
    tiles = rows[cells**2 :].view(down, across, cells, cells, -1)
    whole = tiles.transpose(1, 2).reshape(down * cells, across * cells, -1)
    top, left = (down * cells - left_rows) // 2, (across * cells - left_columns) // 2
    picture = whole[top : top + left_rows, left : left + left_columns]
    if (scaled_rows, scaled_columns) != (left_rows, left_columns):
        channels_first = picture.permute(2, 0, 1)[None]
        scaled = F.interpolate(channels_first, (scaled_rows, scaled_columns), mode="bilinear", align_corners=False)
        picture = scaled[0].permute(1, 2, 0)
    yield torch.cat([picture, end.expand(scaled_rows, 1, -1)], dim=1).flatten(0, 1)
