"""The compiled draws are numpy's own Philox, and those that `draws` makes one sample at a time."""

import numpy as np
import pytest
from planning.kernels.interpreted import interpreted

from dataserver.planning.kernels.draws import first_words
from dataserver.planning.stream.randomness import Operator, draw, draws


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("epoch", [0, 7, 2**40])
def test_the_first_words_are_those_of_each_sample_alone(seed: int, epoch: int) -> None:
    samples = np.array([0, 1, 2**32, 2**63, 2**64 - 1, 5 << 32 | 77], np.uint64)
    found = draw(seed, Operator.TASK, 2**64 - 5, epoch, samples)
    assert found.dtype == np.uint64
    assert found.tolist() == [
        int(draws(seed, Operator.TASK, 2**64 - 5, epoch, int(sample), 1)[0]) for sample in samples
    ]


def test_of_no_samples_there_are_no_words() -> None:
    assert draw(1, Operator.TASK, 2, 3, np.zeros(0, np.uint64)).tolist() == []


def test_the_loop_in_its_text_makes_the_same_words() -> None:
    """What is compiled multiplies 64 by 64 bits, where the text multiplies halves."""
    samples = np.array([0, 1, 2**64 - 1, 0x1234_5678_9ABC_DEF0], np.uint64)
    with np.errstate(over="ignore"):
        found = interpreted("draws").first_words(2**64 - 1, 3, 2**63 + 1, 5, samples)
    assert found.tolist() == first_words(2**64 - 1, 3, 2**63 + 1, 5, samples).tolist()
