"""The reference: one process, one module of each kind, a plain loop over the microbatches of the same samples."""

from collections.abc import Callable

import numpy as np
import torch
from parallel.runtime_cases import Case
from torch import Tensor

from dataserver.planning.randomness import dataset_key
from trainclient.client import Batch
from trainclient.models.backbone import IGNORED_LABEL, BackboneBatch, StageOutput
from trainclient.models.noise import diffusion_noise, timesteps
from trainclient.models.parameters import fill_missing_gradients
from trainclient.parallel.topology import Topology
from trainclient.training.modules import ModelConfigs, build_module

Gradients = dict[str, Tensor]


def reference_gradients(case: Case, skip: Callable[[int], bool] = lambda _: False) -> Gradients:
    """The gradients of a case whose modules all have one rank; `skip` gives the loss of samples a weight of zero."""
    spec = case.parsed.spec
    configs = ModelConfigs.of(case.config, spec)
    places = Topology.of(spec).places
    assert [place.module.name for place in places] == ["vit", "llm", "dit"]
    vit, llm, dit = (build_module(configs, place, case.config, torch.device("cpu")) for place in places)
    for images, text, targets in zip(*(case.batches(name, 0) for name in ("vit", "llm", "dit")), strict=True):
        assert images.plan_hash == text.plan_hash == targets.plan_hash
        encoded = vit(*(images.tensors[name] for name in ("patches", "grid", "cu_patches")))
        embeddings = _moved(encoded, text, "vit", len(text.tensors["embedding_slots"]))
        output: StageOutput = llm(_backbone_batch(text, skip), embeddings=embeddings)
        conditions = _moved(output.conditions, targets, "llm", int(targets.tensors["condition_offsets"][-1]))
        image_loss = _image_loss(case, dit, targets, conditions, skip)
        loss = case.text_weight * output.loss_sum / max(1, text.text_tokens)
        (loss + case.image_weight * image_loss / max(1, text.target_patches)).backward()
    gradients: Gradients = {}
    for name, module in (("vit", vit), ("llm", llm), ("dit", dit)):
        fill_missing_gradients(module)
        gradients |= {f"{name}.{key}": p.grad for key, p in module.named_parameters()}
    return gradients


def _moved(rows: Tensor, batch: Batch, source: str, num_rows: int) -> Tensor:
    """The rows of the module `source` where the routing wants them."""
    (routing,) = (r for r in batch.routings if r.source_module == source)
    moved = rows.new_zeros(num_rows, rows.shape[1])
    for start, target, count in zip(routing.source_start, routing.target_start, routing.rows, strict=True):
        moved = moved.index_copy(0, torch.arange(target, target + count), rows[start : start + count])
    return moved


def _backbone_batch(batch: Batch, skip: Callable[[int], bool]) -> BackboneBatch:
    t = batch.tensors
    labels = t["labels"].clone()
    for i, sample in enumerate(batch.items.sample.tolist()):
        if skip(sample):
            labels[t["cu_lengths"][i] : t["cu_lengths"][i + 1]] = IGNORED_LABEL
    names = ("cu_lengths", "position_ids", "token_ids", "embedding_slots", "condition_slots")
    return BackboneBatch(*(t[name] for name in names), labels)


def _image_loss(
    case: Case, dit: torch.nn.Module, batch: Batch, conditions: Tensor, skip: Callable[[int], bool]
) -> Tensor:
    stream, items, t = case.parsed.stream, batch.items, batch.tensors
    key = dataset_key(stream.datasets[0].name)
    where = [(stream.seed, key, int(p), int(s)) for p, s in zip(items.pass_, items.sample, strict=True)]
    values = np.diff(t["cu_patches"].numpy()) * t["patches"].shape[1]
    noise = [diffusion_noise(*w, 0, int(count)) for w, count in zip(where, values, strict=True)]
    return dit(
        t["patches"],
        t["grid"],
        t["cu_patches"],
        conditions,
        t["condition_offsets"],
        torch.from_numpy(np.concatenate([np.zeros(0), *noise])).view(-1, t["patches"].shape[1]),
        torch.tensor([timesteps(*w, 1)[0] for w in where], dtype=torch.float64),
        torch.tensor([not skip(sample) for sample in items.sample.tolist()], dtype=torch.bool),
    )
