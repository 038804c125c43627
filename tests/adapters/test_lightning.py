"""Lightning's Trainer over the stream: the example of the documentation, as it stands, in real processes."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.examples import ExampleRun, calm_and_killed, example, variables
from adapters.stubs import Base, adapter_over
from adapters.whole_jobs import pass_with_parity, text_job, tiny_model, whole_job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def parameters(run: ExampleRun) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    found: dict[str, torch.Tensor] = torch.load(run.out / "last.ckpt", weights_only=True)["state_dict"]
    return found


def logged(run: ExampleRun, name: str) -> list[float]:
    """What Lightning's logger wrote of each step."""
    (folder,) = (run.folder / "lightning_logs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.value for event in events.Scalars(name)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_and_resumed_twice_once_with_another_number_of_processes(
    server: str, model: Path, tmp_path: Path, python_with: Callable[[str], Path]
) -> None:
    """Every sample of the pass once, and the parameters are those of a run that nobody disturbed."""
    python = python_with("lightning")
    script = example("ServedData(")
    calm, killed = calm_and_killed(
        lambda folder: ExampleRun(script, server, model, folder, pass_with_parity, python), tmp_path, [0, 2, 4]
    )
    torch.testing.assert_close(parameters(killed), parameters(calm), rtol=1e-4, atol=1e-5)
    waited = logged(calm, "data_wait_s")
    assert len(waited) == len(logged(calm, "loss")) == len(calm.trained())
    assert all(seconds > 0 for seconds in waited)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_wherever_lightning_saves_a_resumed_run_goes_on(
    server: str, tmp_path: Path, python_with: Callable[[str], Path]
) -> None:
    """In its hooks, on exceptions, at the end of a job that goes on; what cannot be exact is refused."""
    line = [python_with("lightning"), Path(__file__).with_name("lightning_hooks.py"), server, tmp_path]
    found = subprocess.run(line, env=variables(), capture_output=True, text=True, check=False, timeout=800)
    assert found.returncode == 0, found.stderr[-3000:]


class Alone(Base):
    """A strategy that shards nothing."""

    def __init__(self, sync: bool = False, **options: bool) -> None:
        self._ddp_kwargs, self._layer_sync = options, object() if sync else None


class Trained(SimpleNamespace):
    """A Trainer of a later release, with what it counts, and an argument that nobody knows."""

    def __init__(self, max_epochs: int = 1, loss_scale: float = 1.0, **others: Any) -> None:
        counted = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=Counted())))
        told = {"ckpt_path": None, "max_steps": -1, "should_stop": False, "global_step": 0, "fit_loop": counted}
        super().__init__(**{**told, "max_epochs": max_epochs, "loss_scale": loss_scale, **others})


@dataclass
class Counted:
    """Batches that were run to their end."""

    processed: int = 0


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Over the names that it takes from Lightning."""
    contents = {
        "lightning": {"LightningDataModule": Base, "LightningModule": Base, "Trainer": Base},
        "lightning.pytorch.strategies": {"DDPStrategy": Alone, "SingleDeviceStrategy": Alone},
    }
    return adapter_over(monkeypatch, "lightning", {"lightning": "2.5.1"}, contents)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_epochs": 2}, r"ends after 3 steps, with max_epochs 2.*execution\.end"),
        ({"max_epochs": -1, "max_steps": 4}, r"max_steps 4: .*at most 3"),
        ({"world_size": 2}, r"rank 0 of 2, and the stream is of rank 0 of 1"),
        ({"strategy": Base()}, r"strategy is Base.*set strategy to ddp_find"),
        ({"ranks": 2}, r"gradients of the encoder.*set strategy to ddp_find_unused_parameters_true"),
        ({"lightning_module": SimpleNamespace(automatic_optimization=True)}, r"derive it from ServedModule"),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches is 2; .*leave it at 1"),
        ({"gradient_clip_val": 0.5}, r"gradient_clip_val is 0\.5; .*on_before_optimizer_step"),
        ({"overfit_batches": 0.1, "limit_train_batches": 0.1}, r"overfit_batches is 0\.1; "),
        ({"limit_train_batches": 1}, r"limit_train_batches is 1; .*set max_steps"),
        ({"limit_train_batches": 0}, r"limit_train_batches is 0; "),
        ({"reload_dataloaders_every_n_epochs": 1}, r"reload_dataloaders_every_n_epochs is 1; "),
        ({"strategy": Alone(find_unused_parameters=True, sync=True)}, r"sync_batchnorm is True; "),
        ({"loss_scale": 2.0}, r"loss_scale is 2\.0; this adapter does not know .*leave it at 1\.0"),
    ],
)
def test_trainers_that_contradict_the_job(server: str, adapter: ModuleType, change: dict[str, Any], says: str) -> None:
    module = SimpleNamespace(automatic_optimization=False)
    ranks = change.get("ranks", 1)
    fits = {"global_rank": 0, "world_size": ranks, "strategy": Alone(), "lightning_module": module}
    with FullModelStream(server, whole_job(ranks, {"steps": 3}), rank=0, world_size=ranks) as stream:
        data = adapter.ServedData(stream)
        going = Alone(find_unused_parameters=True)
        data.trainer = Trained(**{**fits, "strategy": going}, max_epochs=-1, max_steps=3, limit_train_batches=1.0)
        data.setup("fit")
        assert len(data.train_dataloader()) == 3
        data.trainer = Trained(**{**fits, **change})
        with pytest.raises(ValueError, match=says):
            data.setup("fit")


def test_a_step_is_run_whole_and_says_what_the_rank_waited(server: str, adapter: ModuleType) -> None:
    logged, shares = dict[str, float](), list[float]()

    class Module(adapter.ServedModule):  # type: ignore[misc, name-defined]
        trainer, device = SimpleNamespace(world_size=1), torch.device("cpu")
        zeroed = 0

        def zero_grad(self) -> None:
            self.zeroed += 1

        def log(self, name: str, value: float) -> None:
            logged[name] = value

        def manual_backward(self, loss: torch.Tensor) -> None:
            shares.append(float(loss))

        def loss_of(self, microbatch: FullModelMicrobatch, text_tokens: int) -> torch.Tensor:
            return torch.tensor((microbatch.tensors["labels"] >= 0).sum() / text_tokens)

    with FullModelStream(server, text_job(), rank=0, world_size=1) as stream:
        step, module = next(iter(stream)), Module()
        module.trainer.datamodule = stream
        with pytest.raises(ValueError, match=r"call trainer\.fit\(module, ServedData\(stream\)\)"):
            module.run_step(step)
        module.trainer.datamodule = adapter.ServedData(stream)
        assert float(module.run_step(step)) == pytest.approx(1.0)
        assert len(shares) == step.num_microbatches
        assert module.zeroed == 1, "what an exception has left"
        assert logged == {"data_wait_s": pytest.approx(stream.wait_s)}


@pytest.mark.parametrize("read", [0, 1, 4])
@pytest.mark.parametrize("counts", ["nothing", "an update", "a batch"])
def test_a_state_goes_on_behind_the_last_update(server: str, adapter: ModuleType, read: int, counts: str) -> None:
    """Whatever was read: a step counts as trained with its update, or with a batch that was run and made none."""
    with FullModelStream(server, text_job(), rank=0, world_size=1) as stream:
        data = adapter.ServedData(stream)
        data.trainer = trainer = Trained(global_step=5)
        assert data.state_dict()["step"] == 0
        steps = iter(data.train_dataloader())
        step = next(steps)
        microbatches = step.microbatches
        list(islice(microbatches, step.num_microbatches if read == 4 else read))
        trainer.global_step += counts == "an update"
        trainer.fit_loop.epoch_loop.batch_progress.total.processed += counts == "a batch"
        trained = counts == "an update" or (counts == "a batch" and read == 4)
        assert data.state_dict()["step"] == trained
        data.trainer = Trained(global_step=0)  # of another fit in this process
        assert next(iter(data.train_dataloader())).number == trained


def test_data_that_lightning_did_not_restore_or_did_not_train_on(server: str, adapter: ModuleType) -> None:
    with FullModelStream(server, text_job(), rank=0, world_size=1) as stream:
        data = adapter.ServedData(stream)
        data.trainer = Trained(ckpt_path="last.ckpt")
        for call in (lambda: next(iter(data.train_dataloader())), lambda: data.teardown("fit")):
            with pytest.raises(ValueError, match=r"last\.ckpt has no state of ServedData; .*data module of that name"):
                call()
        data.load_state_dict({**stream.state_dict(), "step": 1})
        with pytest.raises(ValueError, match=r"took the epoch of last\.ckpt for trained.*from step 1 to"):
            data.teardown("fit")
        for change in ({"max_steps": 1}, {"should_stop": True}):
            data.trainer = Trained(ckpt_path="last.ckpt", **change)
            data.teardown("fit")
        data.trainer = Trained(ckpt_path="last.ckpt")
        assert next(iter(data.train_dataloader())).number == 1
        data.teardown("fit")


@pytest.mark.parametrize("ended", [0, 1])
def test_an_epoch_whose_job_goes_on_is_gone_on_with(server: str, adapter: ModuleType, ended: int) -> None:
    """Lightning has one epoch, and would train nothing behind its end."""
    with FullModelStream(server, text_job(), rank=0, world_size=1) as stream:
        module, data = adapter.ServedModule(), adapter.ServedData(stream)
        module.trainer = Trained(datamodule=data)
        for step, goes_on in ((1, True), (len(stream), False)):
            counts = {"ready": 1, "started": 1, "processed": ended, "completed": ended}
            loop = {"epoch_progress": {"total": dict(counts), "current": dict(counts)}}
            loop["epoch_loop.batch_progress"] = {"is_last_batch": True}
            module.on_load_checkpoint({"ServedData": {"step": step}, "loops": {"fit_loop": loop}})
            open_again = {**counts, "processed": 0, "completed": 0}
            assert (
                loop["epoch_progress"]["total"]
                == loop["epoch_progress"]["current"]
                == (open_again if goes_on else counts)
            )
            assert loop["epoch_loop.batch_progress"]["is_last_batch"] is not goes_on
