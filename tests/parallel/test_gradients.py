"""Gradients of a disaggregated step are those of one process that runs the same samples, unbalanced and unordered.

Real processes, a real server, views through the real client.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parallel.conftest import Fleet
from parallel.reference import Gradients, reference_gradients
from parallel.runtime_cases import Case, Degrees, Pool

BOUNDS = {"float64": 1e-9, "float32": 1e-5}
"""Largest relative error of each parameter's gradient."""
WEIGHTS = {"text_weight": 1.0, "image_weight": 3.0}
"""With these each loss gives the backbone a gradient of similar norm; see `test_losses_weigh_alike`."""


def assert_close(found: Gradients, expected: Gradients, bound: float) -> None:
    for name, reference in expected.items():
        norm = float(torch.linalg.vector_norm(reference))
        distance = float(torch.linalg.vector_norm(found[name] - reference))
        assert norm > 0, name
        assert distance / norm < bound, f"{name}: {distance / norm}"


def test_losses_weigh_alike(fleet: Fleet) -> None:
    _, job = fleet.pair_of_jobs(Degrees())
    norms = []
    for kept in WEIGHTS:
        weights = {name: value if name == kept else 0.0 for name, value in WEIGHTS.items()}
        gradients = reference_gradients(Case(kept, fleet.address, job, **weights))
        norms.append(sum(float(g.square().sum()) for name, g in gradients.items() if name.startswith("llm.")) ** 0.5)
    assert 0.5 < norms[0] / norms[1] < 2


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("degrees", "extra"), [(Degrees(1, 2, 2, 1), 0), (Degrees(2, 2, 1, 2), 2)], ids=str)
def test_gradients_equal_the_reference(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, extra: int) -> None:
    cases = {name: Case(name, fleet.address, {}, **WEIGHTS) for name in fleet.folders}
    datasets = {**{name: name for name in fleet.folders}, "float32": "pairs"}
    cases["float32"] = Case("float32", fleet.address, {}, dtype="float32", **WEIGHTS)
    jobs = {
        name: fleet.pair_of_jobs(degrees, dataset=dataset, extra_in_flight=extra) for name, dataset in datasets.items()
    }
    found = pool.run([replace(case, job=jobs[name][0]) for name, case in cases.items()], tmp_path)
    for name, case in cases.items():
        skipped = {fleet.victims[name]} if name in fleet.victims else set()
        expected = reference_gradients(replace(case, job=jobs[name][1]), skipped.__contains__)
        assert_close(found[name], expected, BOUNDS[case.dtype])


def test_cases_are_what_they_should_be(fleet: Fleet) -> None:
    """Some rank has a microbatch free of images, and each broken dataset has exactly its victim in step 0."""
    ours, _ = fleet.pair_of_jobs(Degrees())
    views = [batch for rank in range(2) for batch in Case("", fleet.address, ours).batches("llm", rank)]
    assert 0 in [len(batch.tensors["embedding_slots"]) for batch in views]
    for name, module in (("understanding", "vit"), ("generation", "dit"), ("documents", "vit")):
        broken, _ = fleet.pair_of_jobs(Degrees(), dataset=name)
        items = [batch.items for batch in Case("", fleet.address, broken).batches(module, 0)]
        assert [sample for i in items for sample in i.sample[~i.valid].tolist()] == [fleet.victims[name]]


def test_gradients_without_generator(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    generation = {"ratio": "0", "query_tokens": 4}
    ours, reference = fleet.pair_of_jobs(Degrees(1, 1, 2, 0), generation=generation)
    found = pool.run([Case("text", fleet.address, ours)], tmp_path)["text"]
    expected = reference_gradients(Case("text", fleet.address, reference))
    idle = {name for name in expected if name.startswith("dit.")} | {"llm.query.weight"}
    assert_close(found, {name: g for name, g in expected.items() if name not in idle}, BOUNDS["float64"])


def test_gradients_without_encoder(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    generation = {"ratio": "1", "query_tokens": 4}
    ours, reference = fleet.pair_of_jobs(Degrees(0, 2, 1, 1), generation=generation)
    found = pool.run([Case("image", fleet.address, ours)], tmp_path)["image"]
    expected = reference_gradients(Case("image", fleet.address, reference))
    idle = {name for name in expected if name.startswith("vit.")} | {"llm.head.weight"}
    assert_close(found, {name: g for name, g in expected.items() if name not in idle}, BOUNDS["float64"])


def test_another_plan_ends_all_ranks(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    ours, _ = fleet.pair_of_jobs(Degrees(1, 1, 1, 0), generation={"ratio": "0", "query_tokens": 4})
    outcomes = pool.outcomes([Case("other", fleet.address, ours, other_plan_rank=0)], tmp_path)
    errors = [line for outcome in outcomes if outcome is not None for line in outcome.splitlines()]
    assert None not in outcomes, errors
    (mismatch,) = (line for line in errors if "BrokerMismatchError: " in line)
    assert "rank 1 waited for embeddings" in mismatch
    assert f"plan {'0' * 16}" in mismatch
