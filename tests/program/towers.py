"""Contrastive jobs of the tests' server, and their loss in one process, which shares no code with the trainer's."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

import torch
import torch.nn.functional as F
from builders.jobs import compose, module
from program.conftest import Fleet
from program.reference import Gradients
from program.runtime_cases import Case
from torch import Tensor, nn

from dataserver.planning.job.identity import Job
from trainclient.client import Batch
from trainclient.topology.process_grid import Topology
from trainclient.training.models import Models

COSTS = {
    "image": {"microbatch_ns": 10_000, "linear_ps": 3_000_000, "quadratic_fs": 10_000_000},
    "text": {"microbatch_ns": 7_000, "linear_ps": 500_000, "quadratic_fs": 1_000_000},
}
SINGLE = {"image": (1, 1), "text": (1, 1)}


def tower_data(
    towers: Mapping[str, tuple[int, ...]], *, dataset: str = "pairs", frozen: Sequence[str] = (), **layout: Any
) -> dict[str, Any]:
    """A job of towers with these degrees, dp, pp and tp each; those whose names begin with `text` read texts."""
    modules = []
    for name, degrees in towers.items():
        modality = "text" if name.startswith("text") else "image"
        fields = {**dict(zip(("dp", "pp", "tp"), degrees, strict=False)), "cost": COSTS[modality]}
        balance = "lpt" if towers != SINGLE else "none"
        marked = {"frozen": True} if name in frozen else {}
        modules.append(module("tower", name, modality=modality, balance=balance, **fields, **marked))
    execution = {key: layout.pop(key) for key in ("transfers",) if key in layout}
    return compose(
        modules,
        datasets=[{"name": dataset}],
        sizing={"patch": 8, "merge": 2, "max_patches": 64},
        seq_len=32,
        global_batch=layout.pop("global_batch", 16),
        contrastive_batch=layout.pop("contrastive_batch", 8),
        packing={"enabled": False},
        seed=7,
        layout={"kind": "contrastive", **layout},
        end={"steps": 6},
        **execution,
    )


def tower_job(fleet: Fleet, towers: Mapping[str, tuple[int, ...]], **options: Any) -> Job:
    """The same, complete."""
    return fleet.completed(tower_data(towers, **options))


def towers_in_one_process(case: Case, skip: frozenset[int] = frozenset()) -> tuple[float, Gradients]:
    """Loss and gradients of a case whose towers have one process each; the pairs of some samples do not count."""
    networks, losses = _networks(case), []
    for features, counts, scale in _batches(case, networks, skip):
        pairs = list(combinations(features.values(), 2))
        rule = _LOSSES[case.config.contrastive.loss]
        losses.append(torch.stack([rule(a[counts], b[counts], scale) for a, b in pairs]).mean() / len(counts))
    loss = torch.stack(losses).mean()
    loss.backward()
    found = {f"{name}.{key}": p.grad for name, network in networks.items() for key, p in network.named_parameters()}
    return float(loss.detach()), found


def recall_in_one_process(case: Case, skip: frozenset[int] = frozenset()) -> dict[str, float]:
    """Recall of retrieval among all samples of the step of such a case."""
    parts: dict[str, list[Tensor]] = {}
    for features, counts, _ in _batches(case, _networks(case), skip):
        for name, made in features.items():
            parts.setdefault(name, []).append(made[counts].detach())
    whole, found = {name: torch.cat(several) for name, several in parts.items()}, {}
    for (here, queries), (there, candidates) in permutations(whole.items(), 2):
        nearest = (queries @ candidates.T).argsort(1, descending=True)
        for k in (1, 5, 10):
            hits = (nearest[:, :k] == torch.arange(len(queries))[:, None]).any(1)
            found[f"{here}_to_{there}_r{k}"] = float(hits.double().mean())
    return found


def _networks(case: Case) -> dict[str, nn.Module]:
    spec, found = case.parsed.spec, {}
    models = Models.of(case.config, spec)
    for process in Topology.of(spec).processes:
        ((_, built),) = models.build(process, torch.device("cpu"))
        found[process.modules[0].name] = built.network
    return found


def _batches(
    case: Case, networks: Mapping[str, nn.Module], skip: frozenset[int]
) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
    """Of each contrastive batch the features of each tower, sorted by samples; which of these count; and the scale."""
    for views in zip(*(case.batches(name, 0) for name in networks), strict=True):
        features, scale = {}, None
        for (name, network), view in zip(networks.items(), views, strict=True):
            made = network(*_inputs(view), None)
            scale = made.scale if made.scale is not None else scale
            features[name] = made.features[torch.tensor(_order(view))]
        samples = [[view.items.sample[i] for i in _order(view)] for view in views]
        assert all(found == samples[0] for found in samples)
        assert scale is not None
        yield features, torch.tensor([int(sample) not in skip for sample in samples[0]]), scale


def _inputs(view: Batch) -> list[Tensor]:
    images, texts = ("patches", "grid", "cu_patches"), ("token_ids", "position_ids", "cu_lengths")
    return [view.tensors[name] for name in (images if "patches" in view.tensors else texts)]


def _order(view: Batch) -> list[int]:
    items = view.items
    return sorted(range(len(items)), key=lambda i: (items.dataset[i], items.epoch[i], items.sample[i]))


def _clip(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    logits, partner = scale[0] * a @ b.T, torch.arange(len(a))
    return (F.cross_entropy(logits, partner, reduction="sum") + F.cross_entropy(logits.T, partner, reduction="sum")) / 2


def _siglip(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(a), dtype=a.dtype) - 1
    return -F.logsigmoid(signs * (scale[0] * a @ b.T + scale[1])).sum()


_LOSSES = {"clip": _clip, "siglip": _siglip}
