"""The contrastive lists mean the full batch: run on CPU in float64, their loss and gradients are those without them."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from builders.contrastive import batch_sync_operations, distmm_operations
from torch import Tensor, nn

from dataserver.planning.simulation import Operation, OperationKind

MICROBATCH, STAGES, WIDTH = 3, 3, 5
TOWERS = (7, 4)
"""Width of an item of each tower."""


def make_towers() -> list[nn.ModuleList]:
    """Two towers, each a pipeline of stages."""
    torch.manual_seed(11)
    made = []
    for width in TOWERS:
        sizes = [width] + [WIDTH] * STAGES
        made.append(nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)))
    return [tower.double() for tower in made]


def loss_of(features: Sequence[Tensor]) -> Tensor:
    """InfoNCE in both directions: every item of one tower against every item of the other."""
    first, second = (nn.functional.normalize(f, dim=1) for f in features)
    scores = first @ second.T / 0.07
    target = torch.arange(len(scores))
    return nn.functional.cross_entropy(scores, target) + nn.functional.cross_entropy(scores.T, target)


def whole_batches(towers: Sequence[nn.ModuleList], items: Sequence[Tensor], groups: int) -> Tensor:
    """The definition: each contrastive batch at once."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in zip(*(i.chunk(groups) for i in items), strict=True):
        features = [nn.Sequential(*tower)(x) for tower, x in zip(towers, batch, strict=True)]
        total = total + loss_of(features)
    total.backward()
    return total.detach()


class Runner:
    """Runs operation lists of all stages of both towers, any operation whose inputs are there."""

    def __init__(self, towers: Sequence[nn.ModuleList], items: Sequence[Tensor], size: int) -> None:
        self.towers, self.size = towers, size
        self.inputs = {(t, 0, m): x for t in range(2) for m, x in enumerate(items[t].split(MICROBATCH))}
        self.outputs: dict[tuple[int, int, int], Tensor] = {}
        self.gradients: dict[tuple[int, int, int], Tensor] = {}
        self.loss = torch.zeros((), dtype=torch.float64)

    def run(self, lists: Sequence[Sequence[Operation]]) -> Tensor:
        todo = [(t, s, list(lists[s])) for t in range(2) for s in range(STAGES)]
        while any(operations for _, _, operations in todo):
            done = [op for t, s, ops in todo if ops and (op := ops[0]) and self._ready(t, s, op) and ops.pop(0)
                    and self._do(t, s, op)]  # fmt: skip
            assert done, "the lists wait for each other"
        return self.loss

    def _ready(self, tower: int, stage: int, operation: Operation) -> bool:
        place = (tower, stage, operation.microbatch)
        if operation.kind is OperationKind.FORWARD:
            return place in self.inputs
        if operation.kind is OperationKind.BACKWARD:
            return place in self.gradients
        mine = range(operation.microbatch * self.size, (operation.microbatch + 1) * self.size)
        return all((t, STAGES - 1, m) in self.outputs for t in range(2) for m in mine)

    def _do(self, tower: int, stage: int, operation: Operation) -> bool:
        place = (tower, stage, operation.microbatch)
        if operation.kind is OperationKind.FORWARD:
            if stage:
                self.inputs[place] = self.inputs[place].detach().requires_grad_()
            self.outputs[place] = self.towers[tower][stage](self.inputs[place])
            self.inputs[tower, stage + 1, operation.microbatch] = self.outputs[place]
        elif operation.kind is OperationKind.BACKWARD:
            self.outputs.pop(place).backward(self.gradients.pop(place))
            if stage:
                gradient = self.inputs[place].grad
                assert gradient is not None
                self.gradients[tower, stage - 1, operation.microbatch] = gradient
        elif tower == 0:  # the second tower's interaction is the same one
            self._interact(operation.microbatch)
        return True

    def _interact(self, group: int) -> None:
        """Concatenate the features of K microbatches, one loss, split its gradient (DISTMM, section 4.3)."""
        mine = range(group * self.size, (group + 1) * self.size)
        features = [
            torch.cat([self.outputs[t, STAGES - 1, m].detach() for m in mine]).requires_grad_() for t in range(2)
        ]
        loss = loss_of(features)
        loss.backward()
        self.loss = self.loss + loss.detach()
        for t in range(2):
            gradient = features[t].grad
            assert gradient is not None
            for m, piece in zip(mine, gradient.split(MICROBATCH), strict=True):
                self.gradients[t, STAGES - 1, m] = piece


@pytest.mark.parametrize(
    ("generate", "groups"), [(batch_sync_operations, 1), (batch_sync_operations, 2), (distmm_operations, 3)]
)
@pytest.mark.parametrize("size", [1, 4])
def test_loss_and_gradients_are_those_of_the_full_batch(generate, groups: int, size: int) -> None:  # type: ignore[no-untyped-def]
    """Check 19: batch-sync with K microbatches, and DISTMM-Pipe with several groups in flight."""
    torch.manual_seed(3)
    items = [torch.randn(groups * size * MICROBATCH, width, dtype=torch.float64) for width in TOWERS]
    ours, theirs = make_towers(), make_towers()
    expected = whole_batches(theirs, items, groups)
    found = Runner(ours, items, size).run(
        [[o for o in generate(s, STAGES, size, groups) if o.computes] for s in range(STAGES)]
    )
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    for mine, whole in zip(ours, theirs, strict=True):
        for a, b in zip(mine.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13)


def test_halves_of_one_batch_are_not_one_batch() -> None:
    """Why groups are barriers: moving the border changes the negatives, and so the loss."""
    torch.manual_seed(3)
    items = [torch.randn(4 * MICROBATCH, width, dtype=torch.float64) for width in TOWERS]
    towers = make_towers()
    assert abs(whole_batches(towers, items, 1) - whole_batches(towers, items, 2) / 2) > 0.1
