"""Positions in time, height and width of the tokens of videos, and what their passes cost."""

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
        now = max([now, *(1 + max(position) for position in mine)])
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


def test_positions_are_those_of_transformers_where_videos_are_no_longer_than_wide() -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    model = modeling.Qwen2_5_VLModel
    found = model.get_vision_position_ids(None, 3, torch.tensor([3, 6, 8]), 1, 2, 1.3).numpy()
    ours = laid_out([(3, 3, 4)], [(13, 10)])[:, 3:-3]
    assert np.array_equal(found, ours)


def test_frames_of_a_video_do_not_attend_to_other_groups() -> None:
    cost = Cost(linear_ps=1_000, quadratic_fs=1_000_000, microbatch_ns=0, backward_percent=200)
    sizes, depths = np.array([100, 1200]), np.array([1, 12])
    assert items_ns(cost, sizes, depths).tolist() == [
        forward_ns(cost, sizes[:1])[0],
        12 * forward_ns(cost, sizes[:1])[0],
    ]
    assert items_ns(cost, sizes, None).tolist() == forward_ns(cost, sizes).tolist()
