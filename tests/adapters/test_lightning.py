"""Lightning's Trainer over the stream: the example of the documentation, as it stands, in real processes."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.examples import ExampleRun, calm_and_killed, example
from adapters.stubs import Base, adapter_over
from adapters.whole_jobs import pass_with_parity, text_job, tiny_model, whole_job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainclient.adapters.whole_rank import WholeMicrobatch, WholeRankStream


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


class Alone(Base):
    """A strategy that shards nothing."""

    def __init__(self, **options: bool) -> None:
        self._ddp_kwargs = options


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
    ],
)
def test_trainers_that_contradict_the_job(server: str, adapter: ModuleType, change: dict[str, Any], says: str) -> None:
    module = SimpleNamespace(automatic_optimization=False)
    ranks = change.get("ranks", 1)
    fits = {"global_rank": 0, "world_size": ranks, "strategy": Alone(), "lightning_module": module}
    with WholeRankStream(server, whole_job(ranks, {"steps": 3}), rank=0, world_size=ranks) as stream:
        data = adapter.ServedData(stream)
        going = Alone(find_unused_parameters=True)
        data.trainer = SimpleNamespace(**{**fits, "strategy": going}, max_epochs=-1, max_steps=3)
        data.setup("fit")
        assert data.train_dataloader() is stream
        data.trainer = SimpleNamespace(**{**fits, "max_epochs": 1, "max_steps": -1, **change})
        with pytest.raises(ValueError, match=says):
            data.setup("fit")


def test_a_step_is_run_whole_and_says_what_the_rank_waited(server: str, adapter: ModuleType) -> None:
    logged, shares = dict[str, float](), list[float]()

    class Module(adapter.ServedModule):  # type: ignore[misc, name-defined]
        trainer, device = SimpleNamespace(world_size=1), torch.device("cpu")

        def log(self, name: str, value: float) -> None:
            logged[name] = value

        def manual_backward(self, loss: torch.Tensor) -> None:
            shares.append(float(loss))

        def loss_of(self, microbatch: WholeMicrobatch, text_tokens: int) -> torch.Tensor:
            return torch.tensor((microbatch.tensors["labels"] >= 0).sum() / text_tokens)

    with WholeRankStream(server, text_job(), rank=0, world_size=1) as stream:
        step, module = next(iter(stream)), Module()
        assert float(module.run_step(step)) == pytest.approx(1.0)
        assert len(shares) == step.num_microbatches
        assert logged == {"data_wait_s": pytest.approx(stream.wait_s)}
