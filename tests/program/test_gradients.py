"""Gradients of a disaggregated step are those of one process that runs the same samples, unbalanced and unordered.

Real processes, a real server, views through the real client. With shares of parameters, also runs and what they save:
here, where the processes are.
"""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from program.conftest import Fleet
from program.covers import Factors, Row, cover
from program.reference import Gradients, reference_gradients
from program.runtime_cases import Case, Degrees, Pool
from torch import Tensor
from training.runs import steps_of

from trainclient.checkpoint.export import _read

BOUNDS = {"float64": 1e-9, "float32": 1e-5}
"""Largest relative error of each parameter's gradient."""
KINDS = ("encoder", "backbone", "generator")
MODULES = ("vit", "llm", "dit")
IMAGES = ("docs", "understanding", "generation", "documents")
"""Datasets; that of pairs is in `test_covers.py`."""
STEPS = 4
"""Of the runs that are saved."""
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
@pytest.mark.parametrize(
    ("degrees", "extra"),
    [
        (Degrees(2, 2, 2, 1), 2),
        pytest.param(Degrees(1, 2, 2, 1), 0, marks=pytest.mark.long),
        pytest.param(Degrees(2, 2, 1, 2), 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_gradients_equal_the_reference(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, extra: int) -> None:
    cases = {name: Case(name, fleet.address, {}, **WEIGHTS) for name in IMAGES}
    datasets = {**{name: name for name in IMAGES}, "float32": "pairs"}
    cases["float32"] = Case("float32", fleet.address, {}, dtype="float32", **WEIGHTS)
    jobs = {
        name: fleet.pair_of_jobs(degrees, dataset=dataset, extra_in_flight=extra) for name, dataset in datasets.items()
    }
    found = pool.run([replace(case, job=jobs[name][0]) for name, case in cases.items()], tmp_path)
    for name, case in cases.items():
        skipped = {fleet.victims[name]} if name in fleet.victims else set()
        expected = reference_gradients(replace(case, job=jobs[name][1]), skipped.__contains__)
        assert_close(found[name], expected, BOUNDS[case.dtype])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(2, 2, 1, 1),
        *(
            pytest.param(degrees, marks=pytest.mark.long)
            for degrees in (
                Degrees(1, 2, 2, 2),
                Degrees(2, 2, 1, 2, colocated=True),
                Degrees(2, 2, 1, 1, group=2),
                Degrees(1, 1, 2, 1, sp=2),
                Degrees(1, 1, 2, 1, tp=(1, 2, 1)),
            )
        ),
    ],
    ids=str,
)
def test_generation_within_documents(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees) -> None:
    """In one of the two datasets an image that is read before a target cannot be decoded."""
    generation = {"ratio": "0.7", "query_tokens": 4, "interleaved": True}
    cases, references = {}, {}
    for name in ("docs", "documents"):
        ours, reference = fleet.pair_of_jobs(degrees, dataset=name, generation=generation)
        cases[name] = Case(name, fleet.address, ours, **WEIGHTS)
        references[name] = replace(cases[name], job=reference)
    found = pool.run(list(cases.values()), tmp_path)
    items = [batch.items for batch in references["documents"].batches("llm", 0)]
    targets = [batch.items for batch in references["documents"].batches("dit", 0)]
    victim = fleet.victims["documents"]
    assert any(victim in i.sample for i in items)
    assert any(int(image) > 0 for i in targets for image in i.image[i.sample == victim])
    for name, reference in references.items():
        skipped = {victim} if name == "documents" else set()
        assert_close(found[name], reference_gradients(reference, skipped.__contains__), BOUNDS["float64"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(2, 2, 1, 1, second_encoder=1, second_generator=1),
        pytest.param(Degrees(1, 1, 2, 1, chunks=2), marks=pytest.mark.long),
        pytest.param(Degrees(1, 2, 2, 1, chunks=2, second_encoder=2), marks=pytest.mark.long),
        pytest.param(Degrees(1, 2, 1, 1, chunks=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_several_modules_of_a_kind_and_interleaved_chunks(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees
) -> None:
    ours, reference = fleet.pair_of_jobs(degrees)
    case = Case("graph", fleet.address, ours, **WEIGHTS)
    expected = reference_gradients(replace(case, job=reference))
    assert_close(pool.run([case], tmp_path)["graph"], expected, BOUNDS["float64"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("degrees", "sharding"),
    [
        pytest.param(Degrees(1, 2, 1, 1, tp=(2, 2, 2)), "zero3", marks=pytest.mark.slow),
        *(
            pytest.param(degrees, sharding, marks=pytest.mark.long)
            for degrees, sharding in (
                (Degrees(1, 1, 2, 1, tp=(2, 2, 1)), "none"),
                (Degrees(1, 2, 1, 1, tp=(1, 2, 2)), "zero3"),
                (Degrees(1, 1, 1, 1, tp=(1, 2, 1)), "none"),
                (Degrees(1, 2, 2, 1, tp=(1, 2, 2)), "none"),
                (Degrees(1, 2, 1, 1, tp=(2, 2, 2)), "zero2"),
                (Degrees(1, 2, 2, 1, tp=(1, 2, 1)), "zero2"),
                (Degrees(2, 1, 1, 2, tp=(2, 1, 2)), "zero2"),
                (Degrees(2, 1, 1, 2, tp=(2, 1, 2)), "zero3"),
                (Degrees(1, 1, 2, 1, chunks=2, tp=(1, 2, 1)), "none"),
                (Degrees(2, 2, 1, 2, colocated=True, tp=(2, 2, 2)), "none"),
                (Degrees(2, 2, 1, 2, colocated=True, tp=(2, 2, 2)), "zero3"),
                (Degrees(1, 1, 2, 1, tp=(1, 2, 2), recompute=("llm", "dit")), "none"),
                (Degrees(1, 2, 1, 1, tp=(1, 2, 1), recompute=("llm",)), "zero3"),
                (Degrees(1, 1, 1, 1, tp=(2, 2, 2), frozen=("llm",)), "none"),
                (Degrees(1, 2, 1, 1, tp=(1, 2, 1), frozen=("vit",)), "zero2"),
                (Degrees(1, 2, 1, 1, tp=(1, 2, 1), frozen=("llm",)), "zero3"),
            )
        ),
    ],
    ids=str,
)
def test_tensor_parallel_peers(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, sharding: str) -> None:
    """In bfloat16 gradients are summed in float32, as without tensor parallelism.

    With few microbatches: torch finds out anew what each operation on split tensors does for each number of rows.
    """
    ours, reference = fleet.pair_of_jobs(degrees, global_batch=4)
    case = Case("float64", fleet.address, ours, sharding=dict.fromkeys(KINDS, sharding), **WEIGHTS)
    found = pool.run([case, replace(case, name="small", dtype="bfloat16")], tmp_path)
    expected = reference_gradients(replace(case, job=reference, sharding={}))
    trained = {name: g for name, g in expected.items() if name.split(".")[0] not in degrees.frozen}
    assert found["float64"].keys() == trained.keys()
    assert_close(found["float64"], trained, BOUNDS["float64"])
    assert {g.dtype for g in found["small"].values()} == {torch.float32}
    assert_close(found["small"], found["float64"], 0.5)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sharded_modules(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """In bfloat16, gradients are summed in float32 as those of whole modules are: over microbatches, and over ranks."""
    ours, reference = fleet.pair_of_jobs(Degrees(2, 2, 1, 2), global_batch=4)
    cases = [
        Case(f"{s} {dtype}", fleet.address, ours, dtype=dtype, sharding=dict.fromkeys(KINDS, s), **WEIGHTS)
        for s, dtype in product(("zero2", "zero3"), ("float32", "bfloat16"))
    ]
    found = pool.run([*cases, Case("whole", fleet.address, ours, dtype="bfloat16", **WEIGHTS)], tmp_path)
    expected = reference_gradients(replace(cases[0], job=reference, sharding={}))
    for sharding in ("zero2", "zero3"):
        assert_close(found[f"{sharding} float32"], expected, BOUNDS["float32"])
        small = found[f"{sharding} bfloat16"]
        assert {g.dtype for g in small.values()} == {torch.float32}
        assert_close(small, found["whole"], 1e-6)
        if sharding == "zero2":  # in the same order
            assert all(torch.equal(g, found["whole"][name]) for name, g in small.items())


@pytest.mark.timeout(400)
def test_ranks_that_wait_for_shares_of_a_late_one_do_not_compute(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    job, _ = fleet.pair_of_jobs(Degrees(1, 2, 1, 1))
    late_in = {"gather": "forward", "sum": "backward"}
    shares = {"backbone": "zero3"}
    pool.run([Case(name, fleet.address, job, sharding=shares, late_for=name) for name in late_in], tmp_path)
    for name, late in late_in.items():
        delay = int((tmp_path / f"{name}.delay").read_text())
        for rank in (1, 2):
            operations = json.loads((tmp_path / f"{name}.{rank}.waits").read_text())
            assert all(waited < whole for _, whole, waited in operations)
            assert rank == 2 or any(waited >= delay for kind, _, waited in operations if kind == late)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("degrees", "shares"),
    [
        (Degrees(3, 2, 1, 1), ("zero3", "zero2", "none")),
        (Degrees(1, 2, 2, 2), ("none", "zero3", "zero2")),
        (Degrees(1, 2, 2, 2), ("none", "zero2", "zero3")),
        (Degrees(2, 2, 2, 1, chunks=2), ("zero2", "zero3", "none")),
        (Degrees(1, 2, 2, 1, chunks=2), ("none", "zero2", "none")),
        (Degrees(1, 3, 2, 1), ("none", "zero3", "none")),
    ],
    ids=str,
)
def test_sharded_pipelines(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, shares: tuple[str, str, str]
) -> None:
    ours, reference = fleet.pair_of_jobs(degrees, global_batch=12 // degrees.backbone * degrees.backbone)
    case = Case("shares", fleet.address, ours, sharding=dict(zip(KINDS, shares, strict=True)), **WEIGHTS)
    expected = reference_gradients(replace(case, job=reference))
    assert_close(pool.run([case], tmp_path)["shares"], expected, BOUNDS["float64"])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param(Degrees(1, 1, 2, 1, frozen=("llm",), recompute=("llm", "dit")), marks=pytest.mark.long),
        pytest.param(Degrees(1, 1, 2, 1, chunks=2, second_encoder=1, frozen=("vit", "dit")), marks=pytest.mark.long),
        pytest.param(Degrees(1, 2, 1, 1, second_encoder=1, frozen=("vit_more", "llm")), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_frozen_modules_have_no_gradients_and_others_the_same(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees
) -> None:
    """The reference trains all modules."""
    ours, reference = fleet.pair_of_jobs(degrees)
    found = pool.run([Case("frozen", fleet.address, ours, **WEIGHTS)], tmp_path)["frozen"]
    expected = reference_gradients(Case("frozen", fleet.address, reference, **WEIGHTS))
    trained = {name: g for name, g in expected.items() if name.split(".")[0] not in degrees.frozen}
    assert found.keys() == trained.keys()
    assert_close(found, trained, BOUNDS["float64"])


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("frozen", [("llm",), ("vit", "llm"), ("dit",)], ids=" and ".join)
@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
def test_frozen_modules_in_shares(
    fleet: Fleet, pool: Pool, tmp_path: Path, sharding: str, frozen: tuple[str, ...]
) -> None:
    ours, reference = fleet.pair_of_jobs(Degrees(1, 2, 1, 2, frozen=frozen))
    case = Case("shares", fleet.address, ours, sharding=dict.fromkeys(KINDS, sharding), **WEIGHTS)
    found = pool.run([case], tmp_path)["shares"]
    expected = reference_gradients(replace(case, job=reference, sharding={}))
    trained = {name: g for name, g in expected.items() if name.split(".")[0] not in frozen}
    assert found.keys() == trained.keys()
    assert_close(found, trained, BOUNDS["float64"])


FACTORS: Factors = {
    "encoder": (1, 2, 3),
    "backbone": (1, 2),
    "stages": (1, 2, 4),
    "generator": (1, 2),
    "chunks": (1, 2),
    "tp": (1, 2),
    "second_encoder": (0, 1),
    "frozen": ((), ("vit",), ("llm",), ("vit", "llm"), ("dit",)),
    "recompute": (False, True),
    "extra": (0, 2),
    "sharding": ("none", "zero2", "zero3"),
}
"""What the layouts of pipelines differ in."""
DEGREES = ("encoder", "backbone", "stages", "generator", "chunks", "tp", "second_encoder")
"""Of these, what processes are started for."""
LAYERS = 4
"""Of the backbone."""


def fits(row: Row, processes: int = 10) -> bool:
    """Whether a job may be so, with no more processes than fit a small machine; interleaved chunks leave no choice of
    what is in flight."""
    chunked = row["chunks"] > 1
    llm = row["backbone"] * row["stages"] * row["tp"]
    return not (
        llm + row["encoder"] + row["generator"] + row["second_encoder"] > processes
        or (chunked and (row["stages"] == 1 or row["stages"] * row["chunks"] > LAYERS or row.get("extra")))
    )


def degrees_of(row: Row) -> Degrees:
    """What processes are started for."""
    return Degrees(**{name: row[name] for name in DEGREES if name != "tp"}, tp=(1, row["tp"], 1))


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_any_two_choices_go_together(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """In float64 and in float32."""
    for number, row in enumerate(cover(FACTORS, fits)):
        again = tuple(name for name in MODULES if row["recompute"] and name not in row["frozen"])
        degrees, folder = replace(degrees_of(row), frozen=row["frozen"], recompute=again), tmp_path / str(number)
        folder.mkdir()
        sharding = dict.fromkeys(KINDS, row["sharding"])
        ours, reference = fleet.pair_of_jobs(degrees, global_batch=12, extra_in_flight=row["extra"])
        cases = [Case(dtype, fleet.address, ours, dtype=dtype, sharding=sharding, **WEIGHTS) for dtype in BOUNDS]
        found = pool.run(cases, folder)
        for case in cases:
            expected = reference_gradients(replace(case, job=reference, sharding={}))
            trained = {name: g for name, g in expected.items() if name.split(".")[0] not in degrees.frozen}
            assert found[case.name].keys() == trained.keys(), row
            assert_close(found[case.name], trained, BOUNDS[case.dtype])


def test_an_encoder_of_ones_own_beside_another(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    own = {"vit_more": {"use": "modules.own_encoder:BlockEncoder", "options": {"hidden": 16}}}
    ours, reference = fleet.pair_of_jobs(Degrees(1, 1, 2, 1, second_encoder=2))
    case = Case("own", fleet.address, ours, modules=own, **WEIGHTS)
    expected = reference_gradients(replace(case, job=reference))
    assert expected["vit_more.0.weight"].shape == (16, 8 * 8 * 3 * 4)
    assert_close(pool.run([case], tmp_path)["own"], expected, BOUNDS["float64"])


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


def a_run(fleet: Fleet, degrees: Degrees, folder: Path, steps: int, **options: Any) -> Case:
    """A run to a step, in a folder of its own, that saves at its end."""
    job = fleet.job(degrees, **options.pop("job", {})).spec.model_dump(mode="json")
    training = {
        "steps": steps,
        "metrics": str(folder / "metrics.jsonl"),
        "checkpoint": {"directory": str(folder), "every": 100},
        "optimizer": {"lr": 0.01},
        **options.pop("training", {}),
    }
    return Case(f"{folder.name}-{steps}", fleet.address, job, training=training, **options)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return steps_of(folder / "metrics.jsonl")


def parameters(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    """All parameters of a checkpoint, as an export reads them."""
    path = folder / f"step-{step:08d}"
    return {f"{module}.{name}": t for module in MODULES for name, t in _read(path, module).items()}


def went_on_alike(folders: dict[str, Path]) -> Gradients:
    """Hold every run against the undisturbed one, `straight`; bit by bit in the same layout, `again`.

    Returns:
        Its parameters.
    """
    undisturbed, expected = metrics(folders["straight"]), parameters(folders["straight"])
    assert [m["step"] for m in undisturbed] == list(range(STEPS))
    for name, folder in folders.items():
        for ours, theirs in zip(metrics(folder), undisturbed, strict=True):
            assert all(ours[key] == theirs[key] for key in ("samples", "sample_digest", "images", "tokens", "flops"))
            for key in ("text_loss", "image_loss", "grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-9), (name, key, ours["step"])
        found = parameters(folder)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-9)
            assert name != "again" or torch.equal(found[key], tensor), key
    return expected


@pytest.mark.long
@pytest.mark.timeout(400)
def test_shares_are_saved_and_others_go_on_from_them(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """Sharded or not, with other degrees; bit by bit in the same layout."""
    shares = dict.fromkeys(KINDS, "zero2")
    folders = {name: tmp_path / name for name in ("straight", "again", "whole", "other")}
    for folder in folders.values():
        folder.mkdir()
    two, one = Degrees(2, 2, 1, 2), Degrees(1, 1, 1, 1)
    three = Degrees(3, 2, 1, 1, recompute=("vit", "llm", "dit"))
    pool.run(
        [
            a_run(fleet, two, folders["straight"], STEPS, sharding=shares),
            a_run(fleet, two, folders["again"], 2, sharding=shares),
        ],
        tmp_path,
    )
    for name in ("whole", "other"):
        shutil.copytree(folders["again"], folders[name], dirs_exist_ok=True)
    pool.run([a_run(fleet, two, folders["again"], STEPS, sharding=shares)], tmp_path)
    pool.run([a_run(fleet, one, folders["whole"], STEPS)], tmp_path)
    mixed = {"encoder": "zero3", "backbone": "zero2"}
    pool.run([a_run(fleet, three, folders["other"], STEPS, sharding=mixed)], tmp_path)

    expected = went_on_alike(folders)

    whole = sum(2 * 8 * t.numel() for t in expected.values())
    sizes = [int((tmp_path / f"straight-{STEPS}.{rank}.bytes").read_text()) for rank in range(two.world_size)]
    assert sum(sizes) == whole
    for first in (0, 2, 4):  # both ranks of a module
        assert max(sizes[first : first + 2]) < 0.55 * sum(sizes[first : first + 2])


@pytest.mark.long
@pytest.mark.timeout(400)
def test_runs_resume_from_tensor_parallel_checkpoints(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """With another tensor-parallel degree, sharded or not; bit by bit in the same layout. Nothing counts twice."""
    ranks, one = Degrees(1, 1, 2, 1, tp=(1, 2, 1)), Degrees(1, 1, 1, 1)
    other = Degrees(1, 2, 1, 1, tp=(2, 2, 1))
    folders = {name: tmp_path / name for name in ("straight", "again", "whole", "other")}
    for folder in folders.values():
        folder.mkdir()
    pool.run([a_run(fleet, ranks, folders["straight"], STEPS), a_run(fleet, ranks, folders["again"], 2)], tmp_path)
    for name in ("whole", "other"):
        shutil.copytree(folders["again"], folders[name], dirs_exist_ok=True)
    pool.run([a_run(fleet, ranks, folders["again"], STEPS)], tmp_path)
    pool.run([a_run(fleet, one, folders["whole"], STEPS)], tmp_path)
    pool.run([a_run(fleet, other, folders["other"], STEPS, sharding={"backbone": "zero2"})], tmp_path)

    expected = went_on_alike(folders)
    sizes = [int((tmp_path / f"straight-{STEPS}.{rank}.bytes").read_text()) for rank in range(ranks.world_size)]
    whole = sum(2 * 8 * t.numel() for key, t in expected.items() if key.startswith("llm."))
    assert sizes[1] == sizes[2]
    assert sum(sizes[1:5]) < 1.2 * whole


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_step_that_is_not_finite_is_skipped_with_shares(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    own = {"use": "training.poisoned:PoisonedEncoder", "options": {"call": 6, "hidden": 8}, "sharding": "zero2"}
    options = {"modules": {"vit": own}, "training": {"on_nonfinite": "skip"}}
    pool.run([a_run(fleet, Degrees(2, 1, 1, 1), tmp_path, 3, **options)], tmp_path)
    found = metrics(tmp_path)
    assert [m["skipped"] for m in found].count(True) == 1
    assert [m["grad_norm"] is None for m in found] == [m["skipped"] for m in found]
    assert all(bool(t.isfinite().all()) for t in _read(tmp_path / "step-00000003", "vit").values())
