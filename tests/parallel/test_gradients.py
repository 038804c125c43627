"""Gradients of a disaggregated step are those of one process that runs the same samples, unbalanced and unordered."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from parallel.runtime_cases import SINGLE, Case, Degrees, DirectViews, case_of, make_job, run_workers
from shards import write_pairs
from torch import Tensor

from dataserver.dataset import Dataset
from dataserver.dataset.build import build_index
from dataserver.planning.identity import Job, parse_job
from dataserver.planning.randomness import dataset_key
from dataserver.preprocessing.tokens import ByteTokenizer, count_dataset_tokens
from trainclient.models.backbone import IGNORED_LABEL, BackboneBatch
from trainclient.models.noise import diffusion_noise, timesteps
from trainclient.models.parameters import fill_missing_gradients
from trainclient.parallel.layout import Layout
from trainclient.training.modules import ModelConfigs, build_module

Gradients = dict[str, Tensor]


def reference_gradients(case: Case, skip: Callable[[tuple[int, int]], bool] = lambda sample: False) -> Gradients:
    """One process, one module of each kind, a plain loop over microbatches; `skip` gives samples a weight of zero."""
    job = parse_job(case.job)
    stream, views = job.stream, DirectViews(job, Path(case.dataset))
    configs = ModelConfigs.of(case.config, job.spec)
    modules = {
        place.module.name: build_module(configs, place, case.config, torch.device("cpu"))
        for place in Layout.of(job.spec).places
    }
    assert len(modules) == 3
    query = stream.generation.query_tokens
    waves = zip(*(views.batches(name, 0, case.step) for name in ("vit", "llm", "dit")), strict=True)
    for images, text, targets in waves:
        t, width = text.tensors, configs.backbone.width
        out = modules["vit"](images.tensors["patches"], images.tensors["grid"], images.tensors["cu_patches"])
        routing = {(r.source_module, r.target_module): r for r in text.routings}
        embeddings = torch.zeros(len(t["embedding_slots"]), width, dtype=out.dtype)
        incoming = routing["vit", "llm"]
        for source, target, rows in zip(incoming.source_start, incoming.target_start, incoming.rows, strict=True):
            embeddings = embeddings.index_copy(0, torch.arange(target, target + rows), out[source : source + rows])
        labels = t["labels"].clone()
        for i, (dataset, sample) in enumerate(zip(text.items.dataset.tolist(), text.items.sample.tolist(), strict=True)):
            if skip((dataset, sample)):
                labels[t["cu_lengths"][i] : t["cu_lengths"][i + 1]] = IGNORED_LABEL
        batch = BackboneBatch(
            t["cu_lengths"], t["position_ids"], t["token_ids"], t["embedding_slots"], t["condition_slots"], labels
        )
        output = modules["llm"](batch, embeddings=embeddings)
        outgoing = routing["llm", "dit"]
        conditions = torch.zeros_like(output.conditions)
        for source, target, rows in zip(outgoing.source_start, outgoing.target_start, outgoing.rows, strict=True):
            assert rows == query
            conditions = conditions.index_copy(
                0, torch.arange(target, target + rows), output.conditions[source : source + rows]
            )
        items, g = targets.items, targets.tensors
        keys = [
            (stream.seed, dataset_key("pairs"), int(p), int(s)) for p, s in zip(items.pass_, items.sample, strict=True)
        ]
        values = np.diff(g["cu_patches"].numpy()) * 8 * 8 * 3
        noise = [diffusion_noise(*k, 0, int(n)) for k, n in zip(keys, values, strict=True)]
        loss = modules["dit"](
            g["patches"],
            g["grid"],
            g["cu_patches"],
            conditions,
            g["condition_offsets"],
            torch.from_numpy(np.concatenate([np.zeros(0), *noise])).view(-1, 192),
            torch.tensor([timesteps(*k, 1)[0] for k in keys], dtype=torch.float64),
            torch.tensor([not skip((int(d), int(s))) for d, s in zip(items.dataset, items.sample, strict=True)]).bool(),
        )
        total = case.text_weight * output.loss_sum / text.text_tokens
        (total + case.image_weight * loss / max(1, text.target_patches)).backward()
    gradients = {}
    for name, module in modules.items():
        fill_missing_gradients(module)
        gradients |= {f"{name}.{key}": p.grad for key, p in module.named_parameters()}
    return gradients


def index(folder: Path) -> str:
    build_index(folder)
    count_dataset_tokens(folder, ByteTokenizer())
    return Dataset.open(folder).fingerprint


def assert_close(found: Gradients, expected: Gradients, bound: float) -> None:
    assert found.keys() >= expected.keys()
    worst = 0.0
    for name, reference in expected.items():
        norm = float(torch.linalg.vector_norm(reference))
        distance = float(torch.linalg.vector_norm(found[name] - reference))
        assert norm > 0, name
        worst = max(worst, distance / norm)
        assert distance / norm < bound, f"{name}: {distance / norm}"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = write_pairs(tmp_path_factory.mktemp("pairs"), 120, 40, seed=3, median_size=64)
    return folder, index(folder)


def jobs(fingerprint: str, degrees: Degrees, **stream: object) -> tuple[Job, Job]:
    ours = make_job(fingerprint, degrees, **stream)
    reference = make_job(fingerprint, SINGLE, balanced=False, **stream)
    assert ours.stream_id == reference.stream_id
    return ours, reference


@pytest.mark.parametrize("degrees", [Degrees(), Degrees(2, 2, 1, 2)], ids=str)
def test_gradients(pairs: tuple[Path, str], tmp_path: Path, degrees: Degrees) -> None:
    folder, fingerprint = pairs
    ours, reference = jobs(fingerprint, degrees)
    weights = {"text_weight": 1.0, "image_weight": 1.0}
    cases = [case_of(d, ours, folder, dtype=d, **weights) for d in ("float64", "float32")]
    found = run_workers(cases, tmp_path)
    for dtype, bound in (("float64", 1e-9), ("float32", 1e-5)):
        assert_close(found[dtype], reference_gradients(case_of(dtype, reference, folder, dtype=dtype, **weights)), bound)
