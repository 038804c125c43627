"""The contrastive losses by name, for those who do not need torch."""

from enum import StrEnum


class ContrastiveLoss(StrEnum):
    """What is learned from the scores of all pairs of a contrastive batch."""

    CLIP = "clip"
    """Cross entropy of each sample's own partner among all, in both directions (CLIP, arXiv 2103.00020, figure 3)."""
    SIGLIP = "siglip"
    """Each pair alone: whether the two belong together (SigLIP, arXiv 2303.15343, algorithm 1)."""
