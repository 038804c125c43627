"""Draws of captions: their shares, what they depend on, and what no draw holds."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from builders.jobs import dataset, make_job

from dataserver.planning.job.identity import JobSpecError
from dataserver.planning.stream.captions import OWN_CAPTION, Captions, captions_of
from dataserver.planning.stream.randomness import Operator, dataset_key, draw

SAMPLES = np.arange(4000, dtype=np.uint64)


def captions(**weights: str) -> list[dict[str, str]]:
    return [{"name": name, "weight": weight} for name, weight in weights.items()]


def of(*entries: dict[str, Any]) -> Captions:
    job = make_job(stream={"datasets": [dataset(captions=list(entries))]})
    return Captions.of(job.stream.datasets[0])


def test_draws_follow_the_weights_and_depend_on_seed_dataset_epoch_and_sample() -> None:
    found = of(*captions(long="3", own="1", short="0.5"))
    assert found.names == ("long", "own", "short")
    assert found.shares == (Fraction(2, 3), Fraction(2, 9), Fraction(1, 9))
    drawn = found.drawn(7, 11, 0, SAMPLES)
    counts = np.bincount(drawn, minlength=3) / len(SAMPLES)
    assert np.abs(counts - [float(share) for share in found.shares]).max() < 0.03
    assert (found.drawn(7, 11, 0, SAMPLES[::-1]) == drawn[::-1]).all()
    for other in (found.drawn(8, 11, 0, SAMPLES), found.drawn(7, 12, 0, SAMPLES), found.drawn(7, 11, 1, SAMPLES)):
        assert 0.3 < np.mean(other == drawn) < 0.7


def test_a_draw_is_the_first_word_of_philox_against_sums_of_shares() -> None:
    found = of(*captions(a="1", b="1", c="2"))
    words = [int(draw(9, Operator.CAPTION, 5, 3, SAMPLES[i : i + 1])[0]) for i in range(50)]
    expected = [0 if word < 2**62 else 1 if word < 2**63 else 2 for word in words]
    assert found.drawn(9, 5, 3, SAMPLES[:50]).tolist() == expected
    assert (int(Operator.CAPTION), set(expected)) == (8, {0, 1, 2})


def test_the_mean_is_rounded_up_and_zero_only_without_tokens() -> None:
    found = of(*captions(a="1", b="0.000000000000001"))
    assert found.expected(np.array([[0, 0, 7, 10**6], [0, 1, 0, 10**6]])).tolist() == [0, 1, 7, 10**6]
    half = of(*captions(a="1", b="1"))
    assert half.expected(np.array([[1, 10], [2, 20]])).tolist() == [2, 15]


def test_which_caption_a_sample_has_in_a_mixture() -> None:
    entries = [dataset("a"), dataset("b", caption="long"), dataset("c", captions=captions(long="1", own="1"))]
    stream = make_job(stream={"datasets": entries, "seed": 3}).stream
    number = np.arange(300, dtype=np.int32) % 3
    epoch, sample = np.arange(300) // 100, np.arange(300, dtype=np.uint64) + 5
    found = captions_of(stream, number, epoch, sample)
    expected = []
    for i in range(300):
        if number[i] == 2:
            drawn = Captions.of(stream.datasets[2]).drawn(3, dataset_key("c"), int(epoch[i]), sample[i : i + 1])
            expected.append(("long", "own")[int(drawn[0])])
        else:
            expected.append(("own", "long")[number[i]])
    assert found == expected
    assert set(found[2::3]) == {"long", "own"}
    assert Captions.of(stream.datasets[0]) == OWN_CAPTION


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"caption": "a", "captions": captions(a="1", b="1")}, "caption is 'a' and captions has others"),
        ({"captions": [*captions(a="1"), *captions(a="2")]}, r"captions \['a'\] are named twice"),
        ({"captions": captions(a="1")}, "captions"),
        ({"captions": captions(a="0", b="0")}, "all weights of captions are 0"),
        ({"captions": captions(a="1", b="0")}, "caption 'b' has the weight 0, a share below the 2.-64"),
        ({"captions": captions(a="0.00001", b="999999999999999")}, "caption 'a' has the weight 0.00001, a share below"),
        ({"caption": "a b"}, "a name is required"),
    ],
)
def test_what_a_job_may_not_say(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobSpecError, match=problem):
        make_job(stream={"datasets": [dataset(**changes)]})


def test_captions_are_part_of_the_stream_and_absent_ones_change_no_identity() -> None:
    ids = {
        make_job(stream={"datasets": [dataset(**changes)]}).stream_id
        for changes in (
            {},
            {"caption": "long"},
            {"captions": captions(a="1", b="2")},
            {"captions": captions(b="2", a="1")},
            {"captions": captions(a="1", b="3")},
        )
    }
    assert len(ids) == 5
