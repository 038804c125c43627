"""The name of a run."""

import hashlib
import json
from typing import Any, Final

from dataserver.planning.job.identity import Job
from trainclient.training.config import TrainConfig
from trainclient.training.model_config import LoraConfig
from trainclient.training.optimizer_config import GroupOptions

DECIDES: Final = frozenset(
    {"encoder", "backbone", "generator", "modules", "optimizer", "text_weight", "image_weight", "dtype", "seed"}
)
"""Fields of the configuration on which a run's losses depend, besides the job."""


def name_run(config: TrainConfig, job: Job) -> str:
    """16 hex digits of a run that begins now: a digest of the job and of all that its losses depend on.

    So a run that ended before its first checkpoint has the same name when it is started again, and another learning
    rate another one. Once there is a checkpoint, the run keeps the name in it, whatever it goes on with.
    """
    return _digest(job.job_id, config)


def digest_settings(config: TrainConfig, job: Job) -> str:
    """16 hex digits of all that losses depend on, but for degrees, policies and the end.

    A run that was told to go back to a step (`--resume-from STEP`) and is started again knows by it that it did so.
    """
    frozen = [m.name for m in job.spec.execution.modules if m.frozen]
    return _digest([job.stream_id, frozen], config)


def _digest(job: object, config: TrainConfig) -> str:
    checks: Any = {"backbone": {"other_tokenizer"}, "modules": {"__all__": {"other_tokenizer"}}}
    decides = config.model_dump(mode="json", include=set(DECIDES), exclude=checks)
    named = decides["modules"].values()
    for sections, field, default in (
        ([decides["encoder"]], "lora", LoraConfig().model_dump(mode="json")),
        ([decides["encoder"], *named], "freeze_tower", False),
        ([decides["optimizer"]], "projector", GroupOptions().model_dump(mode="json")),
        ([decides["backbone"], *named], "vocabulary", None),
    ):
        for section in sections:  # what came later counts only where it is given: earlier runs keep their names
            if section[field] == default:
                del section[field]
    return hashlib.sha256(json.dumps([job, decides], sort_keys=True).encode()).hexdigest()[:16]
