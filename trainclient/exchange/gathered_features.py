"""The features of all samples of a contrastive batch, as its towers gathered them from each other."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GatheredFeatures:
    """A whole contrastive batch, B samples sorted by their names."""

    features: dict[str, Tensor]
    """Features of each tower, [B, width]."""
    valid: Tensor
    """bool [B]: whether no tower knows of something that cannot be decoded."""
    own: Tensor
    """int64 [n]: positions of this process's samples."""
    order: dict[str, Tensor]
    """Order of each tower, int64 [B]: which of its ranks' samples, one rank's after the other's, stands at each
    position."""
    scale: Tensor
    """[2], from the first rank of all."""
