"""Contrastive losses in parts, against torch's own on the whole matrix of scores."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainclient.models.contrastive import MAX_TEMPERATURE, SCORES, Half, Scale, ScoreRows
from trainclient.models.contrastive_loss import ContrastiveLoss

SIZE, WIDTH = 8, 5


def features(seed: int) -> Tensor:
    values = torch.randn(SIZE, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return F.normalize(values, dim=1).requires_grad_()


def whole(loss: ContrastiveLoss, scores: Tensor) -> Tensor:
    partner = torch.arange(len(scores))
    if loss is ContrastiveLoss.CLIP:
        both = [F.cross_entropy(s, partner, reduction="sum") for s in (scores, scores.T)]
        return torch.stack(both).sum() / 2
    return -F.logsigmoid((2 * torch.eye(len(scores)) - 1) * scores).sum()


@pytest.mark.parametrize("loss", ContrastiveLoss)
@pytest.mark.parametrize("invalid", [(), (3,), (0, 1, 7), tuple(range(SIZE))], ids=str)
def test_halves_of_ranks_make_up_the_loss_and_its_gradients(loss: ContrastiveLoss, invalid: tuple[int, ...]) -> None:
    valid = torch.tensor([i not in invalid for i in range(SIZE)])
    a, b, scale = features(0), features(1), torch.tensor([30.0, -2.0], dtype=torch.float64, requires_grad=True)
    offset = scale[1] if loss is ContrastiveLoss.SIGLIP else 0
    expected = whole(loss, scale[0] * a[valid] @ b[valid].T + offset)
    found = torch.autograd.grad(expected, (a, b, scale), materialize_grads=True)
    numbers, given = torch.arange(SIZE), scale.detach()
    ranks = (slice(0, 2), slice(2, 8))
    left: list[ScoreRows] = [SCORES[loss](a.detach()[r], b.detach(), numbers[r], valid, given) for r in ranks]
    right: ScoreRows = SCORES[loss](b.detach(), a.detach(), numbers, valid, given)
    of_left: list[Half] = [rows.half() for rows in left]
    of_right = right.half()
    torch.testing.assert_close(of_right.loss + sum(h.loss for h in of_left), expected.detach())
    together = of_right.scale + sum(h.scale for h in of_left)
    torch.testing.assert_close(together, found[2])
    torch.testing.assert_close(torch.cat([rows.gradient(of_right.normalisers) for rows in left]), found[0])
    torch.testing.assert_close(right.gradient(torch.cat([h.normalisers for h in of_left])), found[1])


@pytest.mark.parametrize("loss", ContrastiveLoss)
def test_an_invalid_pair_cannot_overflow(loss: ContrastiveLoss) -> None:
    """In float32 the exponential of the largest score is infinite."""
    own, valid = torch.eye(2), torch.tensor([False, True])
    rows = SCORES[loss](own, own, torch.arange(2), valid, torch.tensor([MAX_TEMPERATURE, 0.0]))
    half = rows.half()
    assert half.loss.isfinite()
    assert half.scale.isfinite().all()
    assert rows.gradient(half.normalisers).isfinite().all()


def test_a_temperature_beyond_the_largest_is_cut_off_and_comes_back() -> None:
    scale = Scale(ContrastiveLoss.CLIP)
    torch.nn.init.constant_(scale.log_temperature, 6.0)
    made = scale()
    assert float(made[0].detach()) == pytest.approx(MAX_TEMPERATURE)
    made[0].backward()
    assert scale.log_temperature.grad is not None
    assert float(scale.log_temperature.grad) > 0
