"""What is wrong with a contrastive run is said in one sentence, before anything of it starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from program.conftest import Fleet
from program.runtime_cases import Degrees, job_data
from program.towers import tower_data

from trainclient.training.config import validate_config
from trainclient.training.jobs import prepare
from trainclient.training.models import Models
from trainclient.training.rank import check

Data = dict[str, Any]


def of(*image: int, **options: Any) -> Callable[[], Data]:
    """A job whose image towers have these degrees."""
    return lambda: tower_data({"image": image, "text": (1, 1)}, **options)


def padded() -> Data:
    data = of(1, 1)()
    data["execution"]["modules"][0]["padded"] = True
    return data


@pytest.mark.parametrize(
    ("job", "config", "message"),
    [
        (
            lambda: job_data(Degrees(1, 1, 1, 1)),
            {"contrastive": {"loss": "siglip"}},
            "contrastive is given, and the job has no contrastive_batch, so no towers; leave contrastive out, or",
        ),
        (
            of(1, 1),
            {"contrastive": {"features": 0}},
            "contrastive.features: Input should be greater than",
        ),
        (of(1, 1), {"contrastive": {"loss": "triplet"}}, "contrastive.loss: Input should be 'clip' or 'siglip'"),
        (of(1, 1), {"contrastive": {"temperature": 1}}, "contrastive.temperature: this option is unknown"),
        (padded, {}, "module image is padded; this trainer does not pad items, leave padded out"),
        (
            of(1, 1, 3),
            {},
            "module image has tp 3 and heads 4, which ranks cannot split evenly",
        ),
        (of(1, 5), {}, "layers cannot be split into 5 stages; lower pp to at most"),
        (
            of(5, 1),
            {},
            "contrastive_batch 8 does not divide into dp 5 of image x layout.microbatches 1; use",
        ),
        (
            of(1, 1),
            {"encoder": {"lora": {"rank": 2, "targets": ["query", "gate"]}}},
            "lora.targets of module image name gate, and its blocks have down, key",
        ),
        (
            of(1, 1),
            {"modules": {"image": {"use": "a:B"}}},
            "modules.image.use is given, but a tower of one's own cannot be used yet",
        ),
        (
            of(1, 1),
            {"modules": {"audio": {}}},
            r"modules names \['audio'\], which are not in the job; it has \['im",
        ),
    ],
)
def test_one_clear_sentence(fleet: Fleet, tmp_path: Path, job: Callable[[], Data], config: Data, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job()))
    with pytest.raises(ValueError, match=message):  # noqa: PT012  any of the steps before processes start
        found = validate_config({"job": file, "servers": fleet.address, **config})
        jobs, _ = prepare(found)
        Models.of(found, jobs.training.spec)


@pytest.mark.parametrize(
    ("held_out", "message"),
    [
        (of(2, 1), "module image with dp 2, the training job 1; both run on the same processes"),
        (
            lambda: job_data(Degrees(1, 1, 1, 1)),
            r"modules \['vit', 'llm', 'dit'\], the training job \['image', 'text'\]",
        ),
    ],
)
def test_held_out_jobs_of_other_towers(
    fleet: Fleet, tmp_path: Path, held_out: Callable[[], Data], message: str
) -> None:
    files = {name: tmp_path / f"{name}.yaml" for name in ("job", "held")}
    files["job"].write_text(yaml.safe_dump(of(1, 1)()))
    files["held"].write_text(yaml.safe_dump(held_out()))
    with pytest.raises(ValueError, match=message):
        prepare(validate_config({"job": files["job"], "servers": fleet.address, "evaluation": {"job": files["held"]}}))


def test_held_out_streams_of_too_many_samples_are_refused_before_training(fleet: Fleet, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.yaml" for name in ("job", "held")}
    files["job"].write_text(yaml.safe_dump(of(1, 1)()))
    held = of(1, 1)()
    held["execution"]["end"] = {"steps": 8193}
    files["held"].write_text(yaml.safe_dump(held))
    config = {"job": files["job"], "servers": fleet.address, "evaluation": {"job": files["held"]}}
    found = validate_config(config)
    with pytest.raises(ValueError, match="compares 131088 samples with each other, more than 131072"):
        check(found, prepare(found)[0])
    found = validate_config({**config, "evaluation": {**config["evaluation"], "steps": 8192}})
    check(found, prepare(found)[0])
