"""A vision tower on videos: each group of frames is to it what an image is."""

import torch
from torch import Tensor

from trainclient.models.checks import require_shape
from trainclient.models.encoder import ImageEncoder


class VideoEncoder(ImageEncoder):
    """Encodes packed videos as `ImageEncoder` does images; the groups of frames of a video do not see each other."""

    def forward(self, patches: Tensor, grid: Tensor, cu_patches: Tensor, tiles: Tensor | None = None) -> Tensor:
        """Embed every block of merge x merge patches.

        Args:
            patches: uint8 [P, frames * patch * patch * 3], those of a group after those of the one before.
            grid: integers [videos, 3], groups of each, and rows and columns of their frames in patches.
            cu_patches: integers [videos + 1].
            tiles: of images alone.

        Returns:
            [P / merge^2, row_width] in the module's dtype.

        Raises:
            ValueError: the tensors do not agree with each other or with the config.
        """
        sides, ends = groups_of(grid)
        if not torch.equal(cu_patches.to(torch.int64), ends[_first_groups(grid)]):
            found = f"cu_patches begin with {cu_patches[:8].tolist()} and grids with {grid[:8].tolist()}"
            raise ValueError(f"{found}; first patches of videos, and the total, are required")
        return super().forward(patches, sides, ends, tiles)


def groups_of(grid: Tensor) -> tuple[Tensor, Tensor]:
    """The groups of frames of videos as images.

    Args:
        grid: integers [videos, 3], as above.

    Returns:
        Rows and columns of each group, [groups, 2], and the first patch of each and the total, int64 [groups + 1].
    """
    require_shape("grid", grid, -1, 3)
    sides = grid[:, 1:].repeat_interleave(grid[:, 0].to(torch.int64), dim=0)
    ends = sides.to(torch.int64).prod(dim=1).cumsum(0)
    return sides, torch.cat([ends.new_zeros(1), ends])


def _first_groups(grid: Tensor) -> Tensor:
    """The first group of each video, and how many there are. int64 [videos + 1]."""
    return torch.cat([grid.new_zeros(1), grid[:, 0].cumsum(0)]).to(torch.int64)
