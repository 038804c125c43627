"""What single families of models need, each by itself in float64 against a slow reference."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_counts import Launches
from torch import Tensor
from torch.testing import assert_close

from dataserver.planning.plan.rotary_positions import rotary_positions
from trainclient.models import attention
from trainclient.models.attention import Segments, causal_mask, packed_attention
from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.layers import SelfAttention
from trainclient.models.learned_positions import SCALINGS, learned_positions
from trainclient.models.norms import OffsetNorm, RmsNorm
from trainclient.models.parameters import initialise
from trainclient.models.rotary import RotarySections, Rotation
from trainclient.models.windows import window_order

DOUBLE = torch.float64
CPU = torch.device("cpu")
SIZES = BackboneConfig(
    layers=4, width=32, mlp_width=40, heads=4, groups=2, rotary_base=1e4, vocab_size=50, query_tokens=0, head_dim=8
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def sizes(**changes: object) -> BackboneConfig:
    fields = {name: getattr(SIZES, name) for name in SIZES.__slots__}
    return BackboneConfig(**fields | changes)  # type: ignore[arg-type]


def partition(lengths: Sequence[int]) -> Segments:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Segments.from_offsets("offsets", offsets, sum(lengths), CPU)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=3), min_size=1, max_size=4),
    st.integers(0, 6),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_windows_and_blocks_against_one_row_at_a_time(
    samples: list[list[tuple[int, int]]], window: int, two_way: bool
) -> None:
    """Samples of runs of text and images: a row sees what is not ahead, no further back than the window, and with
    `two_way` all of its image within that."""
    kinds = [
        [-1 if k % 2 == 0 else k for k, n in enumerate(n for run in runs for n in run) for _ in range(n)]
        for runs in samples
    ]
    lengths = [len(k) for k in kinds]
    segments, total = partition(lengths), sum(lengths)
    if two_way:
        segments.blocks = torch.tensor([k for sample in kinds for k in sample], dtype=torch.int64)
    query, key, value = (noise(total, 2, 8, seed=s) for s in range(3))
    made = packed_attention(query, key, value, segments, causal=True, window=window)
    expected = torch.zeros_like(made)
    first = 0
    for sample in kinds:
        for row in range(len(sample)):
            seen = [
                other
                for other in range(len(sample))
                if (other <= row or (two_way and sample[row] == sample[other] >= 0))
                and not (window and row - other >= window)
            ]
            rows = torch.tensor(seen) + first
            scores = torch.einsum("hd,shd->hs", query[first + row], key[rows]) / math.sqrt(8)
            expected[first + row] = torch.einsum("hs,shd->hd", scores.softmax(-1), value[rows])
        first += len(sample)
    assert_close(made, expected, rtol=1e-10, atol=1e-10)


def test_layers_share_the_masks_of_their_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    def counted(rows: int, window: int, *others: Any) -> torch.Tensor:
        made.append((rows, window))
        return causal_mask(rows, window, *others)

    monkeypatch.setattr(attention, "causal_mask", counted)
    segments, (query, key, value) = partition([3, 2]), (noise(5, 2, 8, seed=s) for s in range(3))
    for window in (2, 1, 2, 2):
        packed_attention(query, key, value, segments, causal=True, window=window)
    assert made == [(3, 2), (2, 2), (3, 1), (2, 1)]


def test_norms_of_heads_and_scales_of_scores() -> None:
    layer = SelfAttention(
        16, 2, 1, bias=False, causal=True, head_norm=lambda size: OffsetNorm(size, 1e-3), score_scale=0.3
    ).to(DOUBLE)
    for number, parameter in enumerate(layer.parameters()):
        parameter.data = noise(*parameter.shape, seed=number)
    x = noise(5, 16, seed=9)
    made = layer(x, partition([5]), None)
    heads = {}
    for name, linear, norm in (
        ("q", layer.query, layer.query_norm),
        ("k", layer.key, layer.key_norm),
        ("v", layer.value, None),
    ):
        rows = (x @ linear.weight.T).view(5, -1, 8)
        if norm is not None:
            rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-3).sqrt() * (1 + norm.weight)
        heads[name] = rows
    scores = torch.einsum("thd,sd->hts", heads["q"], heads["k"][:, 0]) * 0.3
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hts,sd->thd", scores.softmax(-1), heads["v"][:, 0])
    assert_close(made, mixed.flatten(1) @ layer.output.weight.T, rtol=1e-10, atol=1e-10)


def test_norms_that_count_from_one_begin_as_plain_ones_and_round_once() -> None:
    plain, offset = RmsNorm(8, 1e-6), OffsetNorm(8, 1e-6)
    for norm in (plain, offset):
        initialise(norm, 0, "n")
    x = noise(4, 8).float()
    assert torch.equal(plain(x), offset(x))
    offset.weight.data = noise(8, seed=1).float()
    half = offset.to(torch.bfloat16)
    x16 = x.bfloat16()
    wide = x16.float() * (x16.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + half.weight.float())
    assert_close(half(x16), wide.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize(("sections", "interleaved"), [((2, 3, 3), False), ((4, 2, 2), True), ((3, 3, 2), True)])
def test_sections_of_rotary_positions_pair_by_pair(sections: tuple[int, int, int], interleaved: bool) -> None:
    positions = torch.randint(0, 900, (6, 3), generator=torch.Generator().manual_seed(2))
    heads = noise(6, 2, 16)
    made = Rotation.in_sections(positions, RotarySections(sections, interleaved), 1e4, DOUBLE)(heads)
    order = [axis for axis, n in enumerate(sections) for _ in range(n)]
    if interleaved:  # T H W T H W ..., as long as each has some left, then T
        order, left = [], {1: sections[1], 2: sections[2]}
        for pair in range(8):
            axis = pair % 3
            if axis and left[axis]:
                left[axis] -= 1
            else:
                axis = 0
            order.append(axis)
    for row in range(6):
        for pair, axis in enumerate(order):
            angle = float(positions[row, axis]) * 1e4 ** (-pair / 8)
            turned = torch.view_as_complex(torch.stack([heads[row, :, pair], heads[row, :, pair + 8]], -1))
            turned = turned * complex(math.cos(angle), math.sin(angle))
            assert_close(made[row, :, pair], turned.real, rtol=1e-9, atol=1e-9)
            assert_close(made[row, :, pair + 8], turned.imag, rtol=1e-9, atol=1e-9)
    text = positions[:, :1].expand(-1, 3)
    same = Rotation.in_sections(text, RotarySections(sections, interleaved), 1e4, DOUBLE)(heads)
    assert_close(same, Rotation.of(positions[:, :1], 16, 1e4, DOUBLE)(heads), rtol=1e-12, atol=1e-12)


samples_of_parts = st.lists(
    st.lists(st.one_of(st.integers(1, 5), st.tuples(st.integers(1, 4), st.integers(1, 4))), max_size=5), max_size=4
)


@given(samples_of_parts)
@settings(max_examples=80, deadline=None)
def test_positions_of_three_axes_token_by_token(samples: list[list[int | tuple[int, int]]]) -> None:
    """An image begins where the text before it ends, and the text behind it at its longer side."""
    expected, slots, blocks, ends = [], [], [], [0]
    for parts in samples:
        at = 0
        for part in parts:
            if isinstance(part, int):
                expected += [(at + n,) * 3 for n in range(part)]
                at += part
            else:
                rows, columns = part
                blocks.append(part)
                slots += [len(expected) + n for n in range(rows * columns)]
                expected += [(at, at + n // columns, at + n % columns) for n in range(rows * columns)]
                at += max(part)
        ends.append(len(expected))
    cu_lengths = np.array(ends)
    positions = np.arange(ends[-1]) - np.repeat(cu_lengths[:-1], np.diff(cu_lengths))
    made = rotary_positions(positions, cu_lengths, np.array(slots, np.int64), np.array(blocks, np.int64).reshape(-1, 2))
    assert np.array_equal(made.T, np.array(expected, np.int64).reshape(-1, 3))


@given(
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_windows_hold_every_patch_once(blocks: list[tuple[int, int]], merge: int, side: int) -> None:
    grid = [(rows * merge, columns * merge) for rows, columns in blocks]
    order, ends = window_order(grid, merge, side)
    assert sorted(order) == list(range(len(order)))
    of_patch = []
    for image, (rows, columns) in enumerate(blocks):
        for row in range(rows):
            for column in range(columns):
                of_patch += [(image, row // side, column // side)] * merge**2
    found = [{of_patch[patch] for patch in order[a:b]} for a, b in pairwise(ends)]
    assert all(len(windows) == 1 for windows in found)
    assert len({next(iter(windows)) for windows in found}) == len(found) == len(set(of_patch))


def test_an_encoder_with_windows_is_one_image_by_another() -> None:
    """Windows, RMSNorm and gates; a window as large as all images changes nothing."""
    fields = {"layers": 3, "width": 16, "heads": 2, "mlp_width": 24, "patch": 2, "merge": 2, "output_dim": 8}
    special = {"rms_norms": True, "gated": True, "activation": "silu", "second_frame": True}
    grid = torch.tensor([[4, 6], [2, 10], [8, 8]])
    counts = grid.prod(1)
    patches = torch.randint(0, 256, (int(counts.sum()), 12), dtype=torch.uint8)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    made = {}
    for window in (0, 1, 2, 9):
        model = ImageEncoder(EncoderConfig(**fields, **special, window=window, global_layers=(1,))).to(DOUBLE)  # type: ignore[arg-type]
        initialise(model, 3, "vit")
        with torch.no_grad():
            made[window] = model(patches, grid, offsets)
            alone = [
                model(patches[a:b], g[None], torch.tensor([0, b - a]))
                for g, a, b in zip(grid, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            ]
        assert_close(made[window], torch.cat(alone), rtol=1e-11, atol=1e-11)
    assert_close(made[9], made[0], rtol=1e-11, atol=1e-11)
    assert float((made[2] - made[0]).abs().max()) > 1e-3 < float((made[1] - made[2]).abs().max())


def test_learned_positions_at_corners_and_at_shares_of_a_side() -> None:
    table = noise(9, 4)
    grid = torch.tensor([[5, 5], [6, 3]])
    positions = torch.cat([torch.cartesian_prod(torch.arange(r), torch.arange(c)) for r, c in grid.tolist()])
    segments = partition([25, 18])
    bilinear = learned_positions(table, 3, grid, segments, positions, "bilinear")[:25].view(5, 5, 4)
    assert_close(bilinear[::2, ::2], table.view(3, 3, 4))
    assert_close(bilinear[1, 0], (table[0] + table[3]) / 2)
    nearest = learned_positions(table, 3, grid, segments, positions, "nearest")[25:].view(6, 3, 4)
    assert torch.equal(nearest, table.view(3, 3, 4)[torch.arange(6) // 2])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_learned_positions_of_several_images_are_those_of_each_alone(scaling: str) -> None:
    grid = torch.tensor([[2, 4], [3, 3], [2, 4], [5, 2], [3, 3]])
    table = noise(9, 4)

    def found(grid: Tensor) -> Tensor:
        of_images = [torch.cartesian_prod(torch.arange(r), torch.arange(c)) for r, c in grid.tolist()]
        positions = torch.cat([torch.zeros(0, 2, dtype=torch.int64), *of_images])
        return learned_positions(table, 3, grid, partition([len(p) for p in of_images]), positions, scaling)

    assert torch.equal(found(grid), torch.cat([found(one[None]) for one in grid]))
    assert found(grid[:0]).shape == (0, 4)


def test_images_of_a_grid_that_is_known_cost_no_kernels() -> None:
    def launches(images: int) -> int:
        grid = torch.tensor([[2, 4], [3, 3]]).repeat(images, 1)
        device = torch.device("meta")
        lengths = [8, 9] * images
        segments = Segments(torch.zeros(len(lengths) + 1, dtype=torch.int32, device=device), tuple(lengths), 9)
        with Launches() as counted:
            rows = torch.zeros(17 * images, 2, dtype=torch.int64, device=device)
            found = learned_positions(torch.zeros(9, 4, device=device), 3, grid, segments, rows)
        assert found.shape == (17 * images, 4)
        (counts,) = counted.found.values()
        assert not counts.waits
        return counts.launches.total()

    assert launches(1) == launches(20) < 20


def batch_of(length: int, slots: Tensor, **more: Tensor) -> BackboneBatch:
    none = torch.zeros(0, dtype=torch.int64)
    ids = torch.arange(length) % 50
    return BackboneBatch(torch.tensor([0, length]), torch.arange(length), ids, slots, none, ids.roll(-1), **more)


def backbone(config: BackboneConfig, stage: int = 0, num_stages: int = 1) -> BackboneStage:
    module = BackboneStage(config, stage, num_stages).to(DOUBLE)
    initialise(module, 1, "llm")
    return module


def test_wide_rows_are_added_behind_the_first_layers() -> None:
    config = sizes(deepstack=2)
    whole, slots, rows = backbone(config), torch.tensor([2, 3, 4, 9]), noise(4, 96, seed=4)
    rows.requires_grad_()
    batch = batch_of(12, slots)
    loss = whole(batch, embeddings=rows).loss_sum
    x = whole.embed(batch.token_ids).index_copy(0, slots, rows[:, :32])
    segments, turn = partition([12]), Rotation.of(batch.position_ids[:, None], 8, 1e4, DOUBLE)
    for number, layer in whole.layers.items():
        x = layer(x, segments, turn)
        if int(number) < 2:
            x = x.index_add(0, slots, rows[:, 32 * (int(number) + 1) :][:, :32])
    logits = whole.head(whole.norm(x))
    assert_close(loss, torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum"), rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad(loss, rows)
    assert all(float(part.abs().max()) > 0 for part in gradient.split(32, dim=1))
    with pytest.raises(ValueError, match=r"embeddings has shape \[4, 32\]; \['any', 96\]|\[4, 96\]"):
        whole(batch, embeddings=rows[:, :32])
    with pytest.raises(ValueError, match="of 3 stages the first has 1 layers; set pp"):
        backbone(config, 0, 3)


def test_stages_are_the_whole_whatever_layers_see() -> None:
    """Gemma's norms, windows with a rotary base of their own, and images that see themselves both ways."""
    config = sizes(
        head_norms=True, offset_norms=True, post_norms=True, activation="gelu_tanh", embed_scale=32**0.5,
        window=4, global_layers=(1, 3), windowed_rotary_base=100.0, two_way_images=True,
    )  # fmt: skip
    slots, rows = torch.tensor([1, 2, 3, 4, 7, 8]), noise(6, 32, seed=5)
    blocks = torch.full((11,), -1)
    blocks[slots] = torch.tensor([0, 0, 0, 0, 1, 1])
    batch = batch_of(11, slots, image_blocks=blocks)
    whole = backbone(config)(batch, embeddings=rows).loss_sum
    first = backbone(config, 0, 2)(batch, embeddings=rows).hidden
    assert_close(backbone(config, 1, 2)(batch, hidden=first).loss_sum, whole, rtol=1e-11, atol=1e-11)
    causal = batch_of(11, slots)
    assert float((backbone(config)(causal, embeddings=rows).loss_sum - whole).abs()) > 1e-3


def test_sizes_that_do_not_fit_each_other() -> None:
    with pytest.raises(ValueError, match="sections turn 8 pairs of each head; heads of size 8 have 4"):
        sizes(sections=RotarySections((2, 3, 3)))
    with pytest.raises(ValueError, match="deepstack is 5, and there are 4 layers"):
        sizes(deepstack=5)
    with pytest.raises(ValueError, match=r"projector is 'cnn'; one of merger, mlp, normed_mlp, linear, pool"):
        EncoderConfig(2, 16, 2, 16, 2, 2, 8, projector="cnn")
    with pytest.raises(ValueError, match=r"deepstack names layers \[2\]; there are 2, from 0"):
        EncoderConfig(2, 16, 2, 16, 2, 2, 8, deepstack=(2,))
