"""What the processes of a run do about its outputs: the first one owns them, the others follow it."""

from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from trainclient.checkpoint.lease import take
from trainclient.checkpoint.lease_file import LeaseError
from trainclient.checkpoint.owner import Owner
from trainclient.training.config import CheckpointConfig, TrainConfig
from trainclient.training.control import RunEndedError
from trainclient.training.ownership import outputs, require_unowned
from trainclient.training.rank import ATTEMPTS_KEY, LAUNCH_KEY, Ending, Process, _owned

JOB: Any = SimpleNamespace(job_id="job")


def config(folder: Path, *, take_over: bool = False) -> TrainConfig:
    """Of a run with all outputs."""
    files = {"metrics": folder / "metrics.jsonl", "tensorboard": folder / "curves"}
    return TrainConfig(checkpoint=CheckpointConfig(directory=folder / "ckpt"), take_over=take_over, **files)


def owning(config: TrainConfig, store: HashStore, rank: int, attempt: int = 1) -> AbstractContextManager[Any]:
    store.set(LAUNCH_KEY, "launch")
    store.set(ATTEMPTS_KEY, str(attempt))
    return _owned(config, Process(rank, rank, 2, 2), JOB, store, list[str]().append)


def test_all_outputs_are_owned_while_a_run_lives(tmp_path: Path) -> None:
    store = HashStore()
    with owning(config(tmp_path), store, 0) as leases, owning(config(tmp_path), store, 1) as others:
        assert list(leases) == ["checkpoint", "metrics", "tensorboard"]
        assert others == {}
        found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.lease*"))
        assert found == [".metrics.jsonl.lease-000001", "ckpt/.lease-000001", "curves/.tensorboard.lease-000001"]
        with pytest.raises(LeaseError, match="It is alive"):
            require_unowned(config(tmp_path))
        require_unowned(config(tmp_path, take_over=True))
    assert list(tmp_path.rglob("*.lease*")) == []
    require_unowned(config(tmp_path))


def test_checkpoints_and_curves_may_share_a_folder_and_a_file_has_one_lease_by_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("metrics.jsonl")
    files = {"metrics": tmp_path / "link", "tensorboard": tmp_path}
    with owning(TrainConfig(checkpoint=CheckpointConfig(directory=tmp_path), **files), HashStore(), 0) as leases:
        names = [".lease-000001", ".metrics.jsonl.lease-000001", ".tensorboard.lease-000001"]
        assert [lease.path.name for lease in leases.values()] == names
        for field in ("metrics", "tensorboard"):
            with pytest.raises(LeaseError, match="It is alive"):
                require_unowned(TrainConfig(**{field: {**files, "metrics": tmp_path / "metrics.jsonl"}[field]}))


def test_one_process_says_who_owns_an_output_and_all_end(tmp_path: Path) -> None:
    store, found = HashStore(), config(tmp_path)
    take(outputs(found)["metrics"], Owner.here("another"))
    with pytest.raises(
        LeaseError, match=r"the metrics file .* belongs to another run: run another, .* another --metrics"
    ):
        owning(found, store, 0).__enter__()
    with pytest.raises(RunEndedError, match="belongs to another run: run another") as caught:
        owning(found, store, 1).__enter__()
    assert not caught.value.reports
    assert list((tmp_path / "ckpt").iterdir()) == [], "what it had already is given back"


def test_only_the_first_attempt_of_a_launch_takes_over(tmp_path: Path) -> None:
    found = config(tmp_path, take_over=True)
    take(outputs(found)["metrics"], Owner.here("another"))
    with pytest.raises(LeaseError, match="It is alive"):
        owning(found, HashStore(), 0, attempt=2).__enter__()
    with owning(found, HashStore(), 0) as leases:
        assert leases["metrics"].note.startswith(f"the metrics file {found.metrics} is taken over from run another")


class Told:
    """A control channel that only notes what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def fail(self, said: str) -> None:
        self.said.append(said)


@pytest.mark.parametrize("early", [False, True], ids=["behind", "before"])
def test_a_run_ends_whether_its_outputs_are_lost_before_or_behind_its_channel(early: bool) -> None:
    ending, control = Ending(), Told()
    steps = [lambda: ending.end("another run has the folder"), lambda: ending.through(control)]  # type: ignore[arg-type]
    for step in steps if early else steps[::-1]:
        step()
    assert control.said == ["another run has the folder"]
