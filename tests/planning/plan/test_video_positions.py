"""Positions in time, height and width of the tokens of videos, and what their passes cost."""

from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dataserver.planning.costs.model import forward_ns, items_ns
from dataserver.planning.job.fields import Cost
from dataserver.planning.plan.rotary_positions import rotary_positions


def laid_out(grids: list[tuple[int, int, int]], steps: list[tuple[int, int]]) -> np.ndarray:
    """Text, video, text, video, ... text: int64 [3, T]."""
    counts = [g * h * w for g, h, w in grids]
    slots, at = [], 0
    for count in counts:
        at += 3
        slots += range(at, at + count)
        at += count
    total = at + 3
    blocks = np.array([(g * h, w) for g, h, w in grids])
    times = np.array([(g, *step) for (g, _, _), step in zip(grids, steps, strict=True)])
    ends = np.array([0, total])
    return rotary_positions(np.arange(total), ends, np.array(slots), blocks, times)


def by_hand(grids: list[tuple[int, int, int]], steps: list[tuple[int, int]]) -> np.ndarray:
    """The same, token by token."""
    found, now = [], 0
    for (groups, height, width), (step, parts) in zip([*grids, (0, 0, 0)], [*steps, (1, 1)], strict=True):
        found += [(now + i,) * 3 for i in range(3)]
        now += 3
        mine = [
            (now + t * step // parts, now + h, now + w)
            for t in range(groups)
            for h in range(height)
            for w in range(width)
        ]
        found += mine
        now += max(height, width)
    return np.array(found).T


@pytest.mark.parametrize("steps", [[(1, 1)] * 3, [(3, 2), (1, 1), (2_002_000, 1_000_000)]])
def test_groups_go_on_in_time(steps: list[tuple[int, int]]) -> None:
    grids = [(2, 3, 2), (1, 2, 4), (7, 2, 2)]
    assert np.array_equal(laid_out(grids, steps), by_hand(grids, steps))


def test_an_image_without_times_is_one_group() -> None:
    slots, blocks = np.arange(2, 8), np.array([(3, 2)])
    plain = rotary_positions(np.arange(10), np.array([0, 10]), slots, blocks)
    assert np.array_equal(
        plain, rotary_positions(np.arange(10), np.array([0, 10]), slots, blocks, np.array([(1, 1, 1)]))
    )


GRIDS = [(2, 3, 2), (1, 2, 4), (7, 2, 2), (5, 1, 3)]
"""Groups, rows and columns of merge blocks; the third has more groups than blocks a side."""


def of_transformers(model: str, family: str, grids: list[tuple[int, int, int]], **times: Any) -> np.ndarray:
    """`laid_out` by `get_rope_index` of a model of transformers: int64 [3, T]."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    made = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), f"{family}Model")
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    stub = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    stub.get_vision_position_ids = partial(made.get_vision_position_ids, stub)
    kinds = [kind for g, h, w in grids for kind in (*[0] * 3, *[2] * (g * h * w))] + [0] * 3
    found, _ = made.get_rope_index(
        stub,
        torch.zeros(1, len(kinds), dtype=torch.int64),
        torch.tensor([kinds]),
        video_grid_thw=torch.tensor([(g, 2 * h, 2 * w) for g, h, w in grids]),
        **{name: torch.tensor(value) for name, value in times.items()},
    )
    return np.asarray(found[:, 0])


def test_positions_of_videos_and_of_text_behind_them_are_those_of_qwen2_vl() -> None:
    assert np.array_equal(laid_out(GRIDS, [(1, 1)] * 4), of_transformers("qwen2_vl", "Qwen2VL", GRIDS))


def test_positions_at_a_rate_are_those_of_qwen2_5_vl() -> None:
    """Groups of 1, 0.75, 2.5 and 0.5 seconds, at two positions a second."""
    expected = of_transformers("qwen2_5_vl", "Qwen2_5_VL", GRIDS, second_per_grid_ts=[1.0, 0.75, 2.5, 0.5])
    assert np.array_equal(laid_out(GRIDS, [(2, 1), (3, 2), (5, 1), (1_000_000, 1_000_000)]), expected)


def test_frames_with_text_between_them_have_the_positions_of_qwen3_vl() -> None:
    frames = [(1, 3, 2)] * 2 + [(1, 2, 4)] * 3
    assert np.array_equal(laid_out(frames, [(1, 1)] * 5), of_transformers("qwen3_vl", "Qwen3VL", frames))


def test_frames_of_a_video_do_not_attend_to_other_groups() -> None:
    cost = Cost(linear_ps=1_000, quadratic_fs=1_000_000, microbatch_ns=0, backward_percent=200)
    sizes, depths = np.array([100, 1200]), np.array([1, 12])
    assert items_ns(cost, sizes, depths).tolist() == [
        forward_ns(cost, sizes[:1])[0],
        12 * forward_ns(cost, sizes[:1])[0],
    ]
    assert items_ns(cost, sizes, None).tolist() == forward_ns(cost, sizes).tolist()
