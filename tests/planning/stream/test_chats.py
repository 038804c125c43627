"""Conversations fitted into sequences, against plain loops."""

import numpy as np
import pytest
from builders.jobs import make_job

from dataserver.planning.stream.captions import Captions
from dataserver.planning.stream.columns import ChatColumns, ShardColumns
from dataserver.planning.stream.gathering import size_rows
from dataserver.planning.stream.grids import patch_grids
from dataserver.planning.stream.samples import ShardTable

SIDE = 28
"""Pixels of a token: 2 x 2 patches of 14."""


def _draw(rng: np.random.Generator, count: int) -> tuple[ShardColumns, list[list[tuple[int, int, int]]]]:
    """Columns of conversations, and for each its answers: tokens, images and targets up to their ends."""
    answers, widths = [], []
    for _ in range(count):
        ends, tokens, images, targets = [], 8, 0, 0
        for _ in range(int(rng.integers(1, 5))):
            images += int(rng.integers(0, 2))
            learned = int(rng.integers(0, 9))
            tokens, targets = tokens + 4 + learned, targets + learned
            ends.append((tokens, images, targets))
        answers.append(ends)
        widths += [SIDE * int(n) for n in rng.integers(1, 9, images)]
    last = [ends[-1] for ends in answers]
    images = np.array([n for _, n, _ in last])
    flat = np.array([end for ends in answers for end in ends])
    chats = ChatColumns(
        targets=np.array([n for _, _, n in last]),
        end_offsets=np.cumsum([0, *map(len, answers)]),
        end_text=flat[:, 0],
        end_images=flat[:, 1],
        end_targets=flat[:, 2],
    )
    text = np.array([n for n, _, _ in last]) + 1 - 2 - 2 * images  # one token follows the last answer
    offsets, ones = np.cumsum([0, *images]), np.full(len(widths), SIDE)
    columns = ShardColumns(
        np.arange(count + 1), text, offsets, np.array(widths, np.int32), ones.astype(np.int32), chats=chats
    )
    return columns, answers


@pytest.mark.parametrize("cut", [False, True])
def test_what_fits_a_sequence_is_as_loops_find_it(cut: bool) -> None:
    rng = np.random.default_rng(0)
    job = make_job(stream={"seq_len": 24})
    columns, answers = _draw(rng, 300)
    row = np.flatnonzero(rng.random(300) < 0.8)
    table = size_rows(job.stream, columns, row, "x", Captions(("chat:x",), cut_at_turn=cut))
    rows, sides = patch_grids(columns.image_width, columns.image_height, job.stream.sizing)
    sizes = (rows * sides // 4).tolist()
    wanted = []
    for at in row.tolist():
        first = int(columns.image_offsets[at])
        ends = [(tokens + sum(sizes[first : first + n]), n, targets) for tokens, n, targets in answers[at]]
        total, num_images, targets = ends[-1]
        usable = [end for end in ends if end[0] <= 24 and end[2]]
        if total + 1 <= 24:
            wanted.append((at, total + 1, num_images, targets))
        elif cut and usable:
            wanted.append((at, *usable[-1]))
    assert _found(table) == wanted
    assert 30 < len(wanted) < len(row)
    assert any(found[2] < answers[found[0]][-1][1] for found in wanted) == cut, "images behind a cut are not seen"


def test_a_cut_leaves_the_tokens_that_plans_count_around_images() -> None:
    """Up to its first answer there are 2 tokens of text and 1 image, around which plans count 4."""
    job = make_job(stream={"seq_len": 24})
    ends = np.array([[2, 1, 1], [60, 1, 9]])
    chats = ChatColumns(np.array([9]), np.array([0, 2]), *ends.T)
    side = np.full(1, SIDE, np.int32)
    columns = ShardColumns(np.arange(2), np.array([56]), np.arange(2), side, side, chats=chats)
    table = size_rows(job.stream, columns, np.arange(1), "x", Captions(("chat:x",), cut_at_turn=True))
    assert len(table) == 0


def _found(table: ShardTable) -> list[tuple[int, int, int, int]]:
    """Row, length, images and targets of each sample of a table."""
    assert table.targets is not None
    images = np.diff(table.image_offsets)
    return list(zip(table.row.tolist(), table.nominal.tolist(), images.tolist(), table.targets.tolist(), strict=True))
