"""Recall of retrieval: against sorting in one place, however samples lie on ranks; and what must not look good."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from trainclient.exchange.gathered_features import GatheredFeatures
from trainclient.training import retrieval as module
from trainclient.training.retrieval import AMONG, MAX_RETRIEVED, Retrieval, recall, require_comparable

TOWERS = "image", "text"


def batch(features: Sequence[Tensor], own: Tensor, valid: Tensor) -> GatheredFeatures:
    return GatheredFeatures(dict(zip(TOWERS, features, strict=True)), valid, own, {}, torch.zeros(2))


def counted(features: Sequence[Tensor], valid: Tensor, ranks: int = 1, cut: int = 0) -> Tensor:
    """Counts of all ranks of both towers, with every `ranks`-th sample each, of two batches that meet at `cut`."""
    total, count = torch.zeros(2, len(AMONG) + 1, dtype=torch.int64), len(valid)
    for tower in TOWERS:
        for rank in range(ranks):
            part = Retrieval(TOWERS, tower)
            for span in (slice(cut), slice(cut, count)):
                part.add(batch([f[span] for f in features], torch.arange(rank, len(valid[span]), ranks), valid[span]))
            total += part.counts()
    return total


def by_sorting(queries: Tensor, candidates: Tensor) -> list[float]:
    order = (queries @ candidates.T).argsort(1, descending=True)
    hits = order == torch.arange(len(queries))[:, None]
    return [float(hits[:, :k].any(1).double().mean()) for k in AMONG]


@pytest.mark.parametrize(("ranks", "cut"), [(1, 0), (3, 21), (4, 13)])
def test_as_by_sorting(ranks: int, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In small parts; without the samples that do not count, on either side."""
    parts, split = list[int](), torch.split
    monkeypatch.setattr(module, "MAX_SCORES", 70)
    monkeypatch.setattr(torch, "split", lambda given, size: parts.append(size) or split(given, size))
    torch.manual_seed(5)
    image = torch.randn(40, 6, dtype=torch.float64)
    text = image + torch.randn(40, 6, dtype=torch.float64)
    valid = torch.rand(40) > 0.3
    found = recall(Retrieval(TOWERS, None), counted((image, text), valid, ranks, cut))
    assert found is not None
    assert max(parts) * int(valid.sum()) <= 70
    expected = [*by_sorting(image[valid], text[valid]), *by_sorting(text[valid], image[valid])]
    assert [*found.values()] == pytest.approx(expected)
    assert [*found] == [f"{edge}_r{k}" for edge in ("image_to_text", "text_to_image") for k in AMONG]
    assert 0.2 < found["image_to_text_r1"] < found["image_to_text_r10"] < 1


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_towers_to_which_all_samples_look_alike_find_nothing(value: float) -> None:
    alike, valid = torch.full((30, 4), value), torch.ones(30, dtype=torch.bool)
    assert set((recall(Retrieval(TOWERS, None), counted((alike, alike), valid)) or {}).values()) == {0.0}


def test_what_was_counted_is_forgotten_and_without_a_pair_there_is_no_recall() -> None:
    part, features = Retrieval(TOWERS, "image"), (torch.eye(3), torch.eye(3))
    part.add(batch(features, torch.arange(3), torch.ones(3, dtype=torch.bool)))
    assert part.counts().tolist() == [[3] * 4, [0] * 4]
    assert recall(part, part.counts()) is None
    assert recall(part, counted(features, torch.zeros(3, dtype=torch.bool))) is None


def test_too_many_samples_are_refused() -> None:
    require_comparable(MAX_RETRIEVED)
    with pytest.raises(ValueError, match=r"131073 samples with each other, more than 131072; lower evaluation.steps"):
        require_comparable(MAX_RETRIEVED + 1)
