"""The baselines of `bench_dispatch`: each gives every sample a rank, and none beats the dispatcher."""

import numpy as np
import pytest
from bench_dispatch import SAMPLES, WAYS, dispatched, imbalance, sampled
from benchmarks.samplers import SAMPLERS

RANKS = 8


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_gives_every_sample_a_rank_and_balances_what_it_says(name: str) -> None:
    patches, tokens = sampled(RANKS, 1)
    of_images, of_samples = SAMPLERS[name](patches, tokens, RANKS)
    for rank in (of_images, of_samples):
        assert rank.shape == (RANKS * SAMPLES,)
        assert set(rank.tolist()) == set(range(RANKS))
    as_sampled = WAYS["as sampled"](patches, tokens, RANKS)[1]
    if "transformers" in name:  # its cost is that of padded runs
        longest = [
            [tokens[rank == r].max() * (rank == r).sum() for r in range(RANKS)] for rank in (of_samples, as_sampled)
        ]
        assert max(longest[0]) < max(longest[1])
    else:
        assert imbalance(tokens, of_samples, RANKS) < imbalance(tokens, as_sampled, RANKS)
    ours = dispatched(patches, tokens, RANKS)
    assert imbalance(patches, ours[0], RANKS) <= imbalance(patches, of_images, RANKS)
    assert imbalance(tokens, ours[1], RANKS) <= imbalance(tokens, of_samples, RANKS)
    again = SAMPLERS[name](patches, tokens, RANKS)
    assert all(np.array_equal(one, other) for one, other in zip((of_images, of_samples), again, strict=True))
