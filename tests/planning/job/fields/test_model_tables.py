"""The published numbers of models and devices, written out once more, and operations counted matrix by matrix."""

from dataclasses import astuple
from fractions import Fraction
from itertools import product
from math import ceil

import pytest

from dataserver.planning.job.fields.hardware import (
    LAYER_NS,
    MEMORY_GB_S,
    MODELS,
    PEAK_GIGAFLOPS,
    Coefficients,
    ModelSize,
    backward_percent,
    coefficients,
    linear_flops,
    pair_flops,
)

TINY = (2, 64, 256, 4, 4, 0, False)
VIT_H = (32, 1280, 5120, 16, 16, 0, False)
"""ViT-Huge, arXiv 2010.11929, table 1."""
PUBLISHED = {
    # Whisper's encoder, large: arXiv 2212.04356, table 1.
    "encoder": {"tiny": TINY, "vit-h": VIT_H, "whisper-large": (32, 1280, 5120, 20, 20, 0, False)},
    "backbone": {
        "tiny": (4, 64, 192, 4, 2, 262, False),
        # Llama 2's sizes (arXiv 2307.09288), as DistTrain's table 2 has them; Llama 3's vocabulary, arXiv 2407.21783.
        "llama3-7b": (32, 4096, 11008, 32, 32, 128256, False),
        "llama3-13b": (40, 5120, 13824, 40, 40, 128256, False),
        "llama3-70b": (80, 8192, 28672, 64, 8, 128256, False),
    },
    "generator": {"tiny": TINY, "dit-1b": (26, 1536, 6144, 24, 24, 0, False)},
    "tower": {"tiny": TINY, "vit-h": VIT_H, "clip-text-h": (24, 1024, 4096, 16, 16, 0, True)},
}
"""Layers, width, width of the MLP, heads, heads of keys, vocabulary, causal."""


def test_the_tables_and_all_that_is_made_of_them() -> None:
    """Sizes, devices and the time of a layer as published; of each model the coefficients that follow."""
    plain = 0, False, 0, 0, 0
    found = {kind: {name: astuple(size) for name, size in sizes.items()} for kind, sizes in MODELS.items()}
    assert found == {k: {name: size + plain for name, size in sizes.items()} for k, sizes in PUBLISHED.items()}
    assert dict(PEAK_GIGAFLOPS) == {"a800": 312_000, "h100": 989_400, "h200": 989_400}
    assert LAYER_NS == 10_000
    assert dict(MEMORY_GB_S) == {"a800": 2_039, "h100": 3_350, "h200": 4_800}
    assert ModelSize(1, 2, 3, 4, 5) == ModelSize(1, 2, 3, 4, 5, vocab_size=0, causal=False)
    for kind, sizes in PUBLISHED.items():
        for name, (layers, width, mlp, heads, groups, vocab, causal) in sizes.items():
            gated = kind == "backbone"
            weights = width * (2 * width + 2 * (width // heads) * groups) + (3 if gated else 2) * width * mlp
            weights = layers * (weights + (2 * width * width if kind == "generator" else 0)) + width * vocab
            pairs = layers * width * (2 if gated or causal else 4)
            for device, rate, read in (("a800", 312_000, 2_039), ("h100", 989_400, 3_350), ("h200", 989_400, 4_800)):
                found = coefficients(kind, name, device, Fraction(1, 2), 3, Fraction(1, 4))
                linear, quadratic = Fraction(2 * weights * 2_000, 3 * rate), Fraction(pairs * 4 * 10**6, 3 * rate)
                assert astuple(found) == (
                    layers * 10_000 + ceil(Fraction(2 * weights, 3 * read)),
                    ceil(linear),
                    ceil(quadratic),
                )
    with pytest.raises(ValueError, match="there is no device named 'b'; choose one of a800, h100, h200"):
        coefficients("tower", "tiny", "b", Fraction(1))
    choices = product((False, True), repeat=3)
    percents = [backward_percent(frozen=f, input_gradient=g, checkpoint=c) for f, g, c in choices]
    assert percents == [200, 300, 200, 300, 0, 0, 100, 200]


# Every number a different prime but for the heads, which divide the width: no two terms can be swapped unnoticed.
ODD = ModelSize(layers=7, width=66, mlp_width=101, heads=11, groups=3, vocab_size=31)
ATTENTION = 66 * 66 + 2 * 66 * (6 * 3) + 66 * 66
"""Weights of queries, of keys and values of 3 heads of 6, of the output."""


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        ("encoder", 7 * (ATTENTION + 2 * 66 * 101)),
        ("tower", 7 * (ATTENTION + 2 * 66 * 101)),
        ("generator", 7 * (ATTENTION + 2 * 66 * 66 + 2 * 66 * 101)),
        ("backbone", 7 * (ATTENTION + 3 * 66 * 101) + 66 * 31),
    ],
)
def test_a_row_takes_two_operations_for_each_weight(kind: str, weights: int) -> None:
    assert linear_flops(kind, ODD) == 2 * weights


def test_a_pair_takes_four_operations_for_each_layer_and_column_half_of_them_masked() -> None:
    causal = ModelSize(7, 66, 101, 11, 3, causal=True)
    assert [pair_flops(kind, ODD) for kind in ("encoder", "tower", "generator", "backbone")] == [1848, 1848, 1848, 924]
    assert [pair_flops(kind, causal) for kind in ("tower", "backbone")] == [924, 924]


@pytest.mark.parametrize(
    ("kind", "model", "expected"),
    [
        # Two devices, each at half of 312,000 operations a nanosecond. Llama 2 7B has 6,476,005,376 weights in layers,
        # and 4096 x 128,256 in this head: 14.0 billion operations, and bytes to read at 2,039 a nanosecond.
        ("encoder", "tiny", (20_049, 631, 1_642)),
        ("generator", "tiny", (20_057, 736, 1_642)),
        ("backbone", "tiny", (40_105, 1_368, 1_642)),
        ("backbone", "llama3-7b", (3_753_714, 44_880_398, 840_206)),
        ("backbone", "llama3-13b", (6_944_601, 85_541_285, 1_312_821)),
        ("generator", "dit-1b", (681_179, 5_505_024, 512_000)),
        ("tower", "clip-text-h", (388_107, 1_935_833, 157_539)),
    ],
)
def test_coefficients_in_digits(kind: str, model: str, expected: tuple[int, int, int]) -> None:
    assert astuple(coefficients(kind, model, "a800", Fraction(1, 2), degree=2)) == expected


def test_attention_may_reach_another_share_of_the_peak() -> None:
    whole = coefficients("encoder", "tiny", "h100", Fraction(1, 4))
    apart = coefficients("encoder", "tiny", "h100", Fraction(1, 4), attention=Fraction(1, 5))
    assert whole == Coefficients(20_059, -(-4 * 49_152 * 4_000 // 989_400), -(-512 * 4_000_000 // 989_400))
    assert apart == Coefficients(20_059, whole.linear_ps, -(-512 * 5_000_000 // 989_400))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("backbone", "vit-h", "h100"),
            "there is no backbone named 'vit-h'; choose one of llama3-13b, llama3-70b, llama3-7b, tiny",
        ),
        (("tower", "vit", "h100"), "there is no tower named 'vit'; choose one of clip-text-h, tiny, vit-h"),
        (("encoder", "vit-h", "H100"), "there is no device named 'H100'; choose one of a800, h100, h200"),
    ],
)  # fmt: skip
def test_an_unknown_name_lists_the_known_ones(names: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        coefficients(*names, Fraction(1))
    assert str(refusal.value) == message
