import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dataserver.planning.stream.randomness import Operator, dataset_key, draw, draws

words = st.integers(0, 2**64 - 1)


@given(seed=words, dataset=words, epoch=words, sample=words, operator=st.sampled_from(Operator))
def test_equals_numpys_philox(seed: int, dataset: int, epoch: int, sample: int, operator: Operator) -> None:
    # numpy adds one to the counter before each block, so its first block is that of counter + 1.
    counter = int.from_bytes(b"".join(w.to_bytes(8, "little") for w in (0, sample, epoch, dataset)), "little")
    before = (counter - 1) % 2**256
    reference = np.random.Philox(
        key=np.array([seed, int(operator)], np.uint64),
        counter=np.array([(before >> (64 * i)) & (2**64 - 1) for i in range(4)], np.uint64),
    ).random_raw(11)
    ours = draws(seed, operator, dataset, epoch, sample, 11)
    assert np.array_equal(ours, reference)
    assert draw(seed, operator, dataset, epoch, np.array([sample], np.uint64))[0] == reference[0]


def test_numbers_of_operators_stay() -> None:
    """With another one each run that resumes would draw other words."""
    assert {operator.name: int(operator) for operator in Operator} == {
        "SHARD_ORDER": 1,
        "SAMPLE_ORDER": 2,
        "TASK": 3,
        "DIFFUSION_NOISE": 4,
        "DIFFUSION_TIME": 5,
        "PLAN_SEARCH": 6,
        "IMAGE_TRANSFORM": 7,
        "CAPTION": 8,
        "PART_ORDER": 9,
        "TARGET": 10,
    }


def test_golden_words() -> None:
    laion = dataset_key("laion")
    assert laion == 0x0868ABA881334375
    golden = [0xC5187670F1BC5F75, 0x57D1BA4BDD033C66, 0xDF4C99C1AA0937AB, 0x92753541573B485F, 0x5F990A4F420AAB9A]
    assert [int(word) for word in draws(7, Operator.TASK, laion, 2, 3, 5)] == golden
    assert draws(7, Operator.TASK, laion, 2, 3, 0).shape == (0,)
