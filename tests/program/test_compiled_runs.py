"""Runs whose blocks are compiled, recomputed and sharded, beside those whose blocks are not compiled."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_compiled_run_has_the_losses_of_one_that_is_not(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    job = fleet.job(Degrees(2, 2, 1, 1, recompute=("llm", "dit"))).spec.model_dump(mode="json")
    training = {"steps": 3, "optimizer": {"lr": 0.01}}
    plain = Case("plain", fleet.address, job, dtype="float32", training=training)
    compiled = replace(plain, name="compiled", sharding={"encoder": "zero3", "backbone": "zero2"})
    found = []
    for case, options in ((plain, {}), (compiled, {"compile": True})):
        metrics = tmp_path / f"{case.name}.jsonl"
        pool.run([replace(case, training={**training, **options, "metrics": str(metrics)})], tmp_path)
        found.append([json.loads(line) for line in metrics.read_text().splitlines()])
    for ours, theirs in zip(*found, strict=True):
        for name in ("text_loss", "image_loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
