"""What the processes of a run do about its outputs: the first one owns them, the others follow it."""

import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from trainclient.checkpoint import selection
from trainclient.checkpoint.folder import Checkpoints
from trainclient.checkpoint.lease import Lease, take
from trainclient.checkpoint.lease_file import LeaseError, LeaseLostError
from trainclient.checkpoint.owner import Owner
from trainclient.checkpoint.resume_from import ResumeFrom
from trainclient.checkpoint.selection import Stored
from trainclient.checkpoint.state import CheckpointError, Manifest, SaveError, TrainerState, write_manifest
from trainclient.timeline.recorder import TimelineRecorder
from trainclient.training import rank
from trainclient.training.config import CheckpointConfig, ProfileConfig, TimelineConfig, TrainConfig
from trainclient.training.control_channel import RunEndedError
from trainclient.training.output_leases import outputs, owned, require_unowned
from trainclient.training.profiling import StepProfiler
from trainclient.training.rank import ATTEMPTS_KEY, LAUNCH_KEY, Ending, Process, _owned
from trainclient.training.run_name import name_run
from trainclient.training.saving import Saving

RUN = "0123456789abcdef"
JOB: Any = SimpleNamespace(job_id="job")


@pytest.fixture(autouse=True)
def wandb_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Weights & Biases writes."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


def config(folder: Path, *, take_over: bool = False) -> TrainConfig:
    """Of a run with all outputs."""
    return TrainConfig(
        checkpoint=CheckpointConfig(directory=folder / "ckpt"),
        metrics=folder / "metrics.jsonl",
        tensorboard=folder / "curves",
        timeline=TimelineConfig(directory=folder / "traces"),
        profile=ProfileConfig(directory=folder / "traces"),
        wandb="images/1",
        take_over=take_over,
    )


def owning(config: TrainConfig, store: HashStore, rank: int, attempt: int = 1) -> AbstractContextManager[Any]:
    store.set(LAUNCH_KEY, "launch")
    store.set(ATTEMPTS_KEY, str(attempt))
    return _owned(config, Process(rank, rank, 2, 2), JOB, store, list[str]().append)


def test_all_outputs_are_owned_while_a_run_lives(tmp_path: Path) -> None:
    store = HashStore()
    name = name_run(config(tmp_path), JOB)
    with owning(config(tmp_path), store, 0) as leases, owning(config(tmp_path), store, 1) as others:
        assert list(leases.own) == ["checkpoint", "metrics", "tensorboard", "timeline", "profile", "wandb"]
        assert others.own == {}
        leases.profile.require()
        others.profile.require()
        found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.lease*"))
        assert found == [
            ".metrics.jsonl.lease-000001",
            "ckpt/.lease-000001",
            "curves/.tensorboard.lease-000001",
            "traces/.profile.lease-000001",
            "traces/.timeline.lease-000001",
            f"wandb/.images%2F1-{name}.lease-000001",
        ]
        with pytest.raises(LeaseError, match="It is alive"):
            require_unowned(config(tmp_path), RUN)
        require_unowned(config(tmp_path, take_over=True), RUN)
    assert list(tmp_path.rglob("*.lease*")) == []
    require_unowned(config(tmp_path), RUN)


def test_checkpoints_and_curves_may_share_a_folder_and_a_file_has_one_lease_by_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("metrics.jsonl")
    files = {"metrics": tmp_path / "link", "tensorboard": tmp_path}
    with owning(TrainConfig(checkpoint=CheckpointConfig(directory=tmp_path), **files), HashStore(), 0) as leases:
        names = [".lease-000001", ".metrics.jsonl.lease-000001", ".tensorboard.lease-000001"]
        assert [lease.path.name for lease in leases.own.values()] == names
        for field in ("metrics", "tensorboard"):
            with pytest.raises(LeaseError, match="It is alive"):
                require_unowned(TrainConfig(**{field: {**files, "metrics": tmp_path / "metrics.jsonl"}[field]}), RUN)


def test_one_process_says_who_owns_an_output_and_all_end(tmp_path: Path) -> None:
    store, found = HashStore(), config(tmp_path)
    take(outputs(found, RUN)["metrics"], Owner.here("another"))
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
    take(outputs(found, RUN)["metrics"], Owner.here("another"))
    with pytest.raises(LeaseError, match="It is alive"):
        owning(found, HashStore(), 0, attempt=2).__enter__()
    with owning(found, HashStore(), 0) as leases:
        assert leases.own["metrics"].note.startswith(f"the metrics file {found.metrics} is taken over from run another")


def with_checkpoint(folder: Path) -> Path:
    """A folder whose one checkpoint says it has no tensors."""
    path = folder / "step-00000001"
    path.mkdir(parents=True)
    cursor = {"version": 1, "stream_id": "a" * 64, "step": 1, "stream": "{}"}
    write_manifest(path, Manifest(TrainerState(cursor, {}), {}))
    return path


@pytest.mark.parametrize("moment", ["read_manifest", "seen_damage", "stored_tensors"])
@pytest.mark.parametrize("is_owned", [True, False])
def test_who_checks_a_checkpoint_that_an_owner_elsewhere_removes_meanwhile_hears_of_that_owner(
    tmp_path: Path, moment: str, is_owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = config(tmp_path)
    path = with_checkpoint(tmp_path / "ckpt")
    if is_owned:
        take(outputs(found, RUN)["checkpoint"], Owner.here("another"))
    module = selection if moment == "read_manifest" else rank
    real = getattr(module, moment)

    def read(folder: Path, *more: Any) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        if moment == "seen_damage":
            return ["x.distcp: No such file or directory"]
        return real(folder, *more)

    monkeypatch.setattr(module, moment, read)
    monkeypatch.setattr(rank, "digest_settings", lambda *_: "")
    owner = r"\. But the folder of checkpoints .* belongs to another run, which may .* meanwhile: run another, process"
    with pytest.raises(CheckpointError, match=f"step-00000001 cannot be read .*{owner if is_owned else '[^.]*$'}"):
        rank._checkpoint(found, JOB)


def test_who_resumes_needs_no_second_look_at_what_it_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run takes over and removes it: the tensors are gone, and this run says who has them."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        found = config(tmp_path)
        path = with_checkpoint(tmp_path / "ckpt")
        groups: Any = SimpleNamespace(
            saving=dist.group.WORLD, data_parallel=None, device=torch.device("cpu"), process=SimpleNamespace(tp=0)
        )
        with owned(found, Owner.here(RUN), list[str]().append, take_over=False) as leases:
            choose = Checkpoints.resume_point

            def chosen(checkpoints: Checkpoints, *wanted: Any) -> Stored | None:
                newest = choose(checkpoints, *wanted)
                take(outputs(found, RUN)["checkpoint"], Owner.here("another"), take_over=True)
                shutil.rmtree(path)
                return newest

            monkeypatch.setattr(Checkpoints, "resume_point", chosen)
            streams: Any = SimpleNamespace(load_state_dict=lambda _: None)
            with pytest.raises(SaveError, match="was taken over from this run by another one: run another"):
                Saving(found.checkpoint, groups, leases["checkpoint"]).resume(streams, {}, {}, ResumeFrom.NEWEST, "")
    finally:
        dist.destroy_process_group()


def test_a_machine_with_a_folder_of_its_own_writes_its_profiles_there(tmp_path: Path) -> None:
    """The first process has the lease of its own machine's folder, which no other one sees."""
    store = HashStore()
    here = TrainConfig(profile=ProfileConfig(directory=tmp_path / "other machine", first=0))
    with owning(config(tmp_path), store, 0), owning(here, store, 1) as leases:
        groups: Any = SimpleNamespace(rank=1, device=torch.device("cpu"))
        profiler = StepProfiler(here.profile, groups, leases.profile)
        profiler.begin_step(0)
        profiler.begin_step(1)
    assert [path.name for path in (tmp_path / "other machine").iterdir()] == ["rank-00001.json"]


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


def test_another_run_of_a_weights_and_biases_project_writes_beside_the_first_one() -> None:
    take(outputs(TrainConfig(wandb="images"), RUN)["wandb"], Owner.here(RUN))
    require_unowned(TrainConfig(wandb="images"), "f" * 16)
    require_unowned(TrainConfig(wandb="texts"), RUN)
    with pytest.raises(
        LeaseError, match=rf"^run {RUN} of the Weights & Biases project images in .* alive: wait .* give"
    ):
        require_unowned(TrainConfig(wandb="images"), RUN)


def test_weights_and_biases_writes_for_temporary_files_where_its_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "none"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert outputs(TrainConfig(wandb="images"), RUN)["wandb"].folder == tmp_path / "wandb"


def taken_over(tmp_path: Path, option: str) -> Lease:
    """Of a process that was stopped while another run took its folder."""
    output = outputs(config(tmp_path), RUN)[option]
    lease = take(output, Owner.here(RUN))
    take(output, Owner.here("another"), take_over=True)
    return lease


def test_a_timeline_is_not_written_into_a_folder_that_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = taken_over(tmp_path, "timeline")
    for name in ("tracks_of", "write_report", "MicrobatchSamples"):
        monkeypatch.setattr(f"trainclient.timeline.recorder.{name}", lambda *_: [])
    nothing: Any = SimpleNamespace(get_plan=lambda *_, **__: None)
    recorder = TimelineRecorder(lease.output.folder, range(1), nothing, nothing, nothing, lease)
    with pytest.raises(LeaseLostError, match="was taken over from this run"):
        recorder._write(0, [], nothing, lease.output.folder)
    assert [path for path in lease.output.folder.iterdir() if "lease" not in path.name] == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_profile_is_not_written_into_a_folder_that_was_taken_over(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no process of a run, whichever of them was stopped, and while it was writing."""
    store, found = HashStore(), config(tmp_path)
    with owning(found, store, 0) as first, owning(found, store, 1) as second:
        groups: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"))
        profiler = StepProfiler(
            ProfileConfig(directory=tmp_path / "traces", first=0), groups, (first, second)[rank].profile
        )
        profiler.begin_step(0)
        export = torch.profiler.profile.export_chrome_trace

        def stopped(profiled: Any, path: str) -> Any:
            take(outputs(found, RUN)["profile"], Owner.here("another"), take_over=True)
            return export(profiled, path)

        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", stopped)
        with pytest.raises(LeaseLostError, match="was taken over from this run by another one: run another"):
            profiler.begin_step(1)
        assert [path for path in (tmp_path / "traces").iterdir() if "lease" not in path.name] == []
