"""What a run owns while it trains: the outputs that two runs at once would mix up."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from trainclient.checkpoint.lease import FollowedLease, Lease, renewed, require_free, take
from trainclient.checkpoint.lease_file import Output, current
from trainclient.checkpoint.owner import Owner
from trainclient.checkpoint.selection import last_owner
from trainclient.checkpoint.state import CheckpointError
from trainclient.training.config import TrainConfig

CURVES: Final = ".tensorboard.lease"
"""How leases of TensorBoard's folder begin, which may be the folder of checkpoints, too."""
TIMELINES: Final = ".timeline.lease"
"""The same of the folder of timelines."""
PROFILES: Final = ".profile.lease"
"""The same of the folder of profiles."""


@dataclass(frozen=True, slots=True)
class Leases:
    """Those of a run's outputs, as one of its processes has them."""

    own: Mapping[str, Lease] = field(default_factory=dict)
    """Leases by the names of `outputs`; only the first process has any, which publishes for all."""
    profile: Lease | FollowedLease | None = None
    """Lease of the folder of profiles, into which every process writes; None where a machine has one of its own."""


def outputs(config: TrainConfig, run: str) -> dict[str, Output]:
    """What a run has to own, by the option's field: its checkpoints first.

    Args:
        config: of the run.
        run: its name. Weights & Biases keeps the curves of runs apart by it.
    """
    found: dict[str, Output] = {}
    if (folder := config.checkpoint.directory) is not None:
        found["checkpoint"] = Output(f"the folder of checkpoints {folder}", folder)
    if (file := config.metrics) is not None:
        found["metrics"] = Output.file(f"the metrics file {file}", file, "--metrics")
    if (folder := config.tensorboard) is not None:
        found["tensorboard"] = Output(f"TensorBoard's folder {folder}", folder, CURVES, "--tensorboard")
    if (folder := config.timeline.directory) is not None:
        found["timeline"] = Output(f"the folder of timelines {folder}", folder, TIMELINES, "--timeline.directory")
    if (folder := config.profile.directory) is not None:
        found["profile"] = Output(f"the folder of profiles {folder}", folder, PROFILES, "--profile.directory")
    if (project := config.wandb) is not None:
        folder = _wandb_folder()
        name = f"run {run} of the Weights & Biases project {project} in {folder}"
        found["wandb"] = Output(name, folder, f".{quote(project, safe='')}-{run}.lease", "--wandb or WANDB_DIR")
    return found


def _wandb_folder() -> Path:
    """Where Weights & Biases writes: in WANDB_DIR or here, or for temporary files where that cannot be written."""
    above = Path(os.environ.get("WANDB_DIR") or ".")
    return (above if os.access(above, os.W_OK) else Path(tempfile.gettempdir())) / "wandb"


def require_unowned(config: TrainConfig, run: str) -> None:
    """Refuse early, in the launcher, what a run that is seen to live owns; `owned` decides.

    Args:
        config: of the run.
        run: its name.

    Raises:
        LeaseError: a run on this machine owns an output, or its lease cannot be understood.
    """
    for output in outputs(config, run).values() if not config.take_over else ():
        require_free(output)


@contextmanager
def owner_named(config: TrainConfig) -> Iterator[None]:
    """Say who owns the folder of checkpoints, and may have removed one, where it cannot be read while this is entered.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        yield
    except CheckpointError as error:
        with suppress(OSError):
            found = current(outputs(config, "")["checkpoint"])
            if found is not None and not found.is_free:
                raise CheckpointError(
                    f"{error}. But {found.output.name} belongs to another run, which may have removed it meanwhile: "
                    f"{found.whose}"
                ) from None
        raise


@contextmanager
def owned(
    config: TrainConfig, owner: Owner, lost: Callable[[str], None], *, take_over: bool
) -> Iterator[dict[str, Lease]]:
    """Own all outputs while it is entered; their leases, by the names of `outputs`.

    Args:
        config: of the run.
        owner: this attempt of it.
        lost: called from a thread, with what is to be said, when another run has taken an output over.
        take_over: take them even from a run that lives.

    Raises:
        LeaseError: another run owns one of them, or a lease cannot be written or understood.
    """
    leases: dict[str, Lease] = {}
    with ExitStack() as taken:
        for name, output in outputs(config, owner.run).items():
            after = _last_owner(output) if name == "checkpoint" else 0
            leases[name] = take(output, owner, take_over=take_over, after=after)
            taken.callback(leases[name].release)
            if leases[name].note:
                sys.stderr.write(f"warning: {leases[name].note}\n")
        with renewed(tuple(leases.values()), lost):
            yield leases


def _last_owner(output: Output) -> int:
    """Who wrote there last, whose lease may be gone; a folder that cannot be read is refused with its lease."""
    try:
        return last_owner(output.folder)
    except OSError:
        return 0
