"""Steps that are not finite: where it began, on which samples, and what all processes do about it."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from builders.jobs import make_job
from program.conftest import Fleet
from program.runtime_cases import Degrees
from training.runs import Run

from trainclient.program.finite import FiniteNotes, Origin
from trainclient.stream.microbatch import Items
from trainclient.training.nonfinite_report import explain

FINE, BAD = torch.ones(2), torch.tensor([1.0, float("nan")])


def items(*samples: int) -> Items:
    count = len(samples)
    zeros = np.zeros(count, np.int64)
    return Items(zeros, zeros, np.array(samples, np.uint64), zeros, np.ones(count, np.uint8))


def notes(*passes: tuple[torch.Tensor | None, ...]) -> FiniteNotes:
    """Of microbatches 0, 1, ...: rows in, rows out, the gradient that came, the one that was returned."""
    found = FiniteNotes()
    for microbatch, (rows_in, made, came, returned) in enumerate(passes):
        found.forward(microbatch, items(10 + microbatch, 20, 20), rows_in, [made, None])
        found.backward(microbatch, [came], returned)
    return found


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        ([(FINE, FINE, FINE, FINE), (None, FINE, None, None)], None),
        ([(FINE, FINE, FINE, FINE), (FINE, BAD, BAD, BAD)], (1, "forward")),
        ([(None, torch.tensor([float("inf")]), None, None)], (0, "forward")),
        ([(BAD, BAD, BAD, BAD), (FINE, FINE, BAD, BAD)], None),
        ([(FINE, FINE, FINE, BAD), (FINE, BAD, FINE, FINE)], (0, "backward")),
    ],
)
def test_it_began_where_finite_numbers_went_in(
    passes: list[tuple[torch.Tensor | None, ...]], expected: tuple[int, str] | None
) -> None:
    found = notes(*passes)
    wanted = None if expected is None else Origin(*expected, ((0, 10 + expected[0]), (0, 20)))
    assert found.origin() == wanted
    found.begin_step()
    assert found.origin() is None


def explained(*reports: tuple[FiniteNotes, bool]) -> str:
    """What processes with these notes, and gradients that are finite or not, agree on."""
    store, stream = dist.HashStore(), make_job().stream

    def process(rank: int) -> str:
        group = dist.ProcessGroupGloo(store, rank, len(reports))
        groups: Any = SimpleNamespace(rank=rank, process=f"m{rank} rank 0", world=group, control=group)
        found, finite = reports[rank]
        runner: Any = SimpleNamespace(finite=found, site=SimpleNamespace(module=SimpleNamespace(name=f"m{rank}")))
        return explain(4, [runner], [] if finite else [f"m{rank}"], stream, groups)

    with ThreadPoolExecutor(len(reports)) as threads:
        (text,) = set(threads.map(process, range(len(reports))))
    return text


def test_all_processes_name_the_same_origin() -> None:
    fine, forward, backward = (
        notes((FINE,) * 4),
        notes((FINE,) * 4, (FINE, BAD, BAD, BAD)),
        notes((FINE, FINE, FINE, BAD)),
    )
    assert explained((fine, True), (backward, False), (forward, False)) == (
        "the gradients of step 4 are not finite: m2 on global rank 2 (m2 rank 0) made what is not finite of finite "
        "numbers in the forward of microbatch 1, of the samples laion shard 0 row 11, laion shard 0 row 20"
    )
    found = explained((fine, True), (backward, False))
    assert "m1 on global rank 1 (m1 rank 0) made what is not finite of finite numbers in the backward of" in found
    assert explained((fine, True), (fine, False)) == (
        "the gradients of step 4 are not finite, of m1; all rows between modules were finite"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", [pytest.param("stop", marks=pytest.mark.long), "skip"])
def test_a_run_names_the_samples_and_stops_or_skips(fleet: Fleet, tmp_path: Path, policy: str) -> None:
    run, config = Run(fleet.address, tmp_path), tmp_path / "train.yaml"
    own = {"use": "training.poisoned:PoisonedEncoder", "options": {"call": 10, "hidden": 8}}
    config.write_text(yaml.safe_dump({"modules": {"vit": own}}))
    options = ("--steps", "3", "--config", str(config), "--on-nonfinite", policy)
    code, errors = run.train(Degrees(1, 1, 1, 1, colocated=True), *options)
    where = "the gradients of step 1 are not finite: vit on global rank 0 (vit + llm + dit rank 0) made what is not"
    assert where in errors
    assert re.search(r"in the forward of microbatch \d, of the samples pairs shard \d row \d+", errors)
    found = run.metrics()
    assert all(m["flops"] is m["mfu_percent"] is None for m in found)  # a module of one's own need not count them
    if policy == "stop":
        assert (code, len(found)) == (1, 1)
        assert "or set on_nonfinite to skip" in errors
        assert [line.split(":")[0] for line in errors.splitlines() if "not finite" in line] == ["trainclient"]
    else:
        assert code == 0, errors
        assert [m["skipped"] for m in found] == [False, True, False]
        assert [m["grad_norm"] is None for m in found] == [False, True, False]
        assert sorted(p.name for p in run.checkpoints.iterdir())[-1] == "step-00000003"
