"""The compiled draws are numpy's own Philox, and those that `draws` makes one sample at a time."""

import numpy as np
import pytest

from dataserver.planning.randomness import Operator, draw, draws


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("pass_", [0, 7, 2**40])
def test_the_first_words_are_those_of_each_sample_alone(seed: int, pass_: int) -> None:
    samples = np.array([0, 1, 2**32, 2**63, 2**64 - 1, 5 << 32 | 77], np.uint64)
    found = draw(seed, Operator.TASK, 2**64 - 5, pass_, samples)
    assert found.dtype == np.uint64
    assert found.tolist() == [
        int(draws(seed, Operator.TASK, 2**64 - 5, pass_, int(sample), 1)[0]) for sample in samples
    ]


def test_of_no_samples_there_are_no_words() -> None:
    assert draw(1, Operator.TASK, 2, 3, np.zeros(0, np.uint64)).tolist() == []
