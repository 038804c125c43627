"""The name of a run."""

import hashlib
import json
from typing import Final

from dataserver.planning.identity import Job
from trainclient.training.config import TrainConfig

DECIDES: Final = frozenset(
    {"encoder", "backbone", "generator", "modules", "optimizer", "text_weight", "image_weight", "dtype", "seed"}
)
"""Fields of the configuration on which a run's losses depend, besides the job."""


def name_run(config: TrainConfig, job: Job) -> str:
    """16 hex digits of a run that begins now: a digest of the job and of all that its losses depend on.

    So a run that ended before its first checkpoint has the same name when it is started again, and another learning
    rate another one. Once there is a checkpoint, the run keeps the name in it, whatever it goes on with.
    """
    decides = config.model_dump(mode="json", include=set(DECIDES))
    text = json.dumps([job.job_id, decides], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
