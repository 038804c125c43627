"""Runs that go on from the checkpoint that they are told to."""

from pathlib import Path
from typing import Any

import pytest
from program.conftest import Fleet
from program.runtime_cases import Case, Degrees, Pool
from training.runs import steps_of

from trainclient.checkpoint.state import read_manifest

DEGREES = Degrees(1, 1, 1, 1)


def case(fleet: Fleet, folder: Path, steps: int, resume_from: int | str) -> Case:
    """A run to a step that saves every step."""
    job = fleet.job(DEGREES).spec.model_dump(mode="json")
    training: dict[str, Any] = {
        "steps": steps,
        "metrics": str(folder / "metrics.jsonl"),
        "checkpoint": {"directory": str(folder), "every": 1, "keep": 9},
        "resume_from": resume_from,
    }
    return Case(f"resumed-{steps}", fleet.address, job, training=training)


@pytest.mark.timeout(400)
def test_damage_is_named_and_older_checkpoints_are_gone_on_from(fleet: Fleet, pool: Pool, tmp_path: Path) -> None:
    """Files are divided among the processes, which all end with the same error."""
    pool.run([case(fleet, tmp_path, 3, "newest")], tmp_path)
    lines = steps_of(tmp_path / "metrics.jsonl")
    last = tmp_path / "step-00000003"
    assert set(read_manifest(last).state.degrees) == {"vit", "llm", "dit"}
    for file in last.glob("*.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 8
        file.write_bytes(bytes(content))
    errors = pool.outcomes([case(fleet, tmp_path, 4, "newest")], tmp_path)
    assert all(said is not None and "CheckpointError" in said for said in errors)
    assert all(f"{last} cannot be read (rank 0: __" in (said or "") for said in errors)
    assert all("distcp is damaged: it has CRC-32C" in (said or "") for said in errors)
    pool.run([case(fleet, tmp_path, 4, "newest-whole")], tmp_path)
    assert f"warning: {last} is passed over (rank 0: __" in pool.said(0)
    assert steps_of(tmp_path / "metrics.jsonl")[:2] == lines[:2]
    digests = [step["sample_digest"] for step in steps_of(tmp_path / "metrics.jsonl")]
    assert digests[:3] == [step["sample_digest"] for step in lines]
    assert len(list(tmp_path.glob("aside-step-00000003-*"))) == 1
    said = pool.said(0)
    pool.run([case(fleet, tmp_path, 5, 1)], tmp_path)
    assert read_manifest(tmp_path / "step-00000005").line.before == ((0, 1),)
    pool.run([case(fleet, tmp_path, 6, 1)], tmp_path)
    told = pool.said(0).removeprefix(said)
    assert "this run went back to step 1 before, and has checkpoints up to step 5 since: it goes on there" in told
    assert [step["step"] for step in steps_of(tmp_path / "metrics.jsonl")] == list(range(6))
