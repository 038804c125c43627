"""Runs whose blocks are compiled, recomputed, sharded and split, beside those whose blocks are not compiled."""

import json
from pathlib import Path
from typing import Any

import pytest
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool

LORA = {"lora": {"rank": 2, "targets": ["query", "down"]}}
Options = dict[str, Any]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("degrees", "plain", "compiled"),
    [
        (
            Degrees(2, 2, 1, 1, recompute=("llm", "dit")),
            {},
            {"encoder": {"sharding": "zero3"}, "backbone": {"sharding": "zero2"}},
        ),
        (Degrees(1, 1, 1, 1, tp=(2, 2, 2), recompute=("dit",)), {}, {}),
        (
            Degrees(1, 2, 1, 1, tp=(1, 2, 1), recompute=("llm",)),
            {"backbone": LORA},
            {"backbone": {**LORA, "sharding": "zero3"}},
        ),
        (Degrees(1, 1, 2, 1, sp=2), {}, {}),
    ],
    ids=["shares", "tp", "shares of tp adapters", "shared sequences"],
)
def test_a_compiled_run_has_the_losses_of_one_that_is_not(
    fleet: Fleet, pool: Pool, tmp_path: Path, degrees: Degrees, plain: Options, compiled: Options
) -> None:
    job = fleet.job(degrees).spec.model_dump(mode="json")
    found = []
    for name, options in (("plain", plain), ("compiled", {**compiled, "compile": True})):
        metrics = tmp_path / f"{name}.jsonl"
        training = {"steps": 3, "optimizer": {"lr": 0.01}, "metrics": str(metrics), **options}
        pool.run([Case(name, fleet.address, job, dtype="float32", training=training)], tmp_path)
        found.append([json.loads(line) for line in metrics.read_text().splitlines()])
    for ours, theirs in zip(*found, strict=True):
        for name in ("text_loss", "image_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
