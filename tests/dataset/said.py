"""Everything that is served of a dataset, so that the same samples in other files can be compared with it."""

import numpy as np

from dataserver.dataset import Dataset, DocumentParts

Said = tuple[str, DocumentParts, list[tuple[int, ...]], list[bytes]]
"""Key and parts of a sample, what the index says of each of its images, clips and videos, and their bytes."""


def said_of(dataset: Dataset) -> list[Said]:
    """Every sample, in order."""
    found: list[Said] = []
    for shard in dataset.shards:
        counts = np.diff(shard.sizes().image_offsets).tolist()
        for row, key in enumerate(shard.keys()):
            refs = [shard.image(row, n) for n in range(counts[row])]
            sizes = [(r.width, r.height, r.orientation, r.modality, r.frames, r.microseconds) for r in refs]
            found.append((key, shard.parts(row), sizes, [dataset.read(ref) for ref in refs]))
    return found
