"""The reference: one process, all of every module, a plain loop over the microbatches of the same samples.

It shares the networks with the trainer, and neither its losses nor anything that moves rows.
"""

from collections.abc import Callable, Mapping

import torch
from program.runtime_cases import Case
from torch import Tensor, nn

from dataserver.planning.job.fields import ModuleKind
from dataserver.planning.stream.randomness import Operator, dataset_key
from trainclient.client import Batch
from trainclient.models.backbone import IGNORED_LABEL, BackboneBatch, StageOutput
from trainclient.models.noise import diffusion_noise, diffusion_times, image_words
from trainclient.modules import NoiseKey, TrainedModule, View
from trainclient.topology.process_grid import Topology
from trainclient.training.models import Models

Gradients = dict[str, Tensor]
Names = tuple[str, ...]


def reference_gradients(case: Case, skip: Callable[[int], bool] = lambda _: False) -> Gradients:
    """The gradients of a case whose modules all have one rank; `skip` gives the loss of samples a weight of zero."""
    spec = case.parsed.spec
    models, modules = Models.of(case.config, spec), {}
    for process in Topology.of(spec).processes:
        ((_, modules[process.modules[0].name]),) = models.build(process, torch.device("cpu"))
    networks = {name: module.network for name, module in modules.items()}
    encoders, generators = (
        tuple(m.name for m in spec.execution.of_kind(kind)) for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR)
    )
    views = [case.batches(name, 0) for name in networks]
    for found in zip(*views, strict=True):
        wave = dict(zip(networks, found, strict=True))
        assert len({batch.plan_hash for batch in found}) == 1
        encoded = {name: _encoded(case, modules[name], name, wave[name]) for name in encoders}
        _run(case, networks, wave, encoded, generators, skip).backward()
    gradients: Gradients = {}
    for name, network in networks.items():
        for key, p in network.named_parameters():
            gradients[f"{name}.{key}"] = torch.zeros_like(p) if p.grad is None else p.grad
    return gradients


def _run(
    case: Case,
    networks: Mapping[str, nn.Module],
    wave: Mapping[str, Batch],
    encoded: Mapping[str, Tensor],
    generators: Names,
    skip: Callable[[int], bool],
) -> Tensor:
    """The loss of a wave."""
    text, llm = wave["llm"], networks["llm"]
    embeddings = torch.zeros(len(text.tensors["embedding_slots"]), llm.config.width, dtype=llm.embed.weight.dtype)
    for name, rows in encoded.items():
        embeddings = _moved(rows, text, name, embeddings)
    output: StageOutput = llm(_backbone_batch(text, skip), embeddings=embeddings)
    loss = case.text_weight * output.loss_sum / max(1, text.text_tokens)
    for name in generators:
        targets = wave[name]
        conditions = torch.zeros(int(targets.tensors["condition_offsets"][-1]), llm.config.width).to(embeddings)
        conditions = _moved(output.conditions, targets, "llm", conditions)
        image_loss = _image_loss(case, networks[name], targets, conditions, skip)
        loss = loss + case.image_weight * image_loss / max(1, text.target_patches)
    return loss


def _encoded(case: Case, module: TrainedModule, name: str, batch: Batch) -> Tensor:
    """What an encoder makes of its images, or clips."""
    if name not in case.modules:
        names = ("mel", "cu_frames", "cu_positions") if "mel" in batch.tensors else ("patches", "grid", "cu_patches")
        return module.network(*(batch.tensors[key] for key in names))
    rows = module.forward(View(batch.tensors, batch.items, NoiseKey.of(case.parsed.stream)), None).rows
    assert rows is not None
    return rows.values


def _moved(rows: Tensor, batch: Batch, source: str, into: Tensor) -> Tensor:
    """The rows of the module `source` where the routing wants them."""
    (routing,) = (r for r in batch.routings if r.source_module == source)
    for start, target, count in zip(routing.source_start, routing.target_start, routing.rows, strict=True):
        into = into.index_copy(0, torch.arange(target, target + count), rows[start : start + count])
    return into


def _backbone_batch(batch: Batch, skip: Callable[[int], bool]) -> BackboneBatch:
    t = batch.tensors
    labels = t["labels"].clone()
    for i, sample in enumerate(batch.items.sample.tolist()):
        if skip(sample):
            labels[t["cu_lengths"][i] : t["cu_lengths"][i + 1]] = IGNORED_LABEL
    names = ("cu_lengths", "position_ids", "token_ids", "embedding_slots", "condition_slots")
    return BackboneBatch(*(t[name] for name in names), labels)


def _image_loss(case: Case, dit: nn.Module, batch: Batch, conditions: Tensor, skip: Callable[[int], bool]) -> Tensor:
    stream, items, t = case.parsed.stream, batch.items, batch.tensors
    keys = [dataset_key(dataset.name) for dataset in stream.datasets]
    signed = [key - (1 << 64 if key >> 63 else 0) for key in keys]
    names = [
        torch.tensor([[signed[int(d)], int(p), int(s), int(i)]])
        for d, p, s, i in zip(items.dataset, items.epoch, items.sample, items.image, strict=True)
    ]
    counts, dim = t["cu_patches"].diff().to(torch.int64), t["patches"].shape[1]
    noise = [
        diffusion_noise(image_words(stream.seed, Operator.DIFFUSION_NOISE, name), count[None], dim)
        for name, count in zip(names, counts, strict=True)
    ]
    times = [diffusion_times(image_words(stream.seed, Operator.DIFFUSION_TIME, name)) for name in names]
    return dit(
        t["patches"],
        t["grid"],
        t["cu_patches"],
        conditions,
        t["condition_offsets"],
        torch.cat([torch.zeros(0, dim), *noise]),
        torch.cat([torch.zeros(0, dtype=torch.float64), *times]),
        torch.tensor([not skip(sample) for sample in items.sample.tolist()], dtype=torch.bool),
    )
