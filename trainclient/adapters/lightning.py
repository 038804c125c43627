"""Lightning's Trainer over the stream, whose state is part of Lightning's own checkpoints.

    trainer.fit(module, ServedData(stream), ckpt_path="last")

One batch is a step of this rank with all its microbatches, whose number may differ from step to step. So the module
optimizes by hand, as `ServedModule` does.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream, Step
from trainclient.adapters.lightning_arguments import check_trainer_arguments
from trainclient.adapters.versions import require

require("lightning", "2.5", "3")
from lightning import LightningDataModule, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402


class ServedData(LightningDataModule):
    """The stream of this rank as training data, whose state goes into Lightning's checkpoints with that of its data.

    Not with its loaders': that is lost where a loader is asked for early, as by `estimated_stepping_batches`, and says
    nothing of a step that was read and not learned.
    """

    def __init__(self, stream: FullModelStream) -> None:
        super().__init__()
        self.stream = stream
        self._last: _Given | None = None
        """The step that was handed out last."""
        self._restored = False

    def setup(self, stage: str) -> None:
        """Called before training; ValueError if Trainer or module contradict the job."""
        if stage == "fit":
            self.stream.require_rank_and_size(self.trainer.global_rank, self.trainer.world_size)
            check_trainer_arguments(self.trainer)
            _check_trainer(self.trainer, self.stream)
            self._go_to_untrained()
            self._restored = False

    def train_dataloader(self) -> "_Steps":
        """The stream: Lightning shards nothing but a DataLoader."""
        return _Steps(self)

    def state_dict(self) -> dict[str, Any]:
        """The stream's, behind the steps whose updates were made; the same on all ranks."""
        return {**self.stream.state_dict(), "step": self._next_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of any number of ranks; StateError if it is of another stream."""
        self.stream.load_state_dict(state_dict)
        self._last, self._restored = None, True

    def teardown(self, stage: str) -> None:
        """Called behind training; ValueError if Lightning took the job for trained, and it is not."""
        trainer = self.trainer
        untouched = self._last is None and self.stream.step < len(self.stream)
        if stage == "fit" and untouched and trainer.max_steps == -1 and not trainer.should_stop:
            self._require_restored()
            raise ValueError(
                f"Lightning took the epoch of {trainer.ckpt_path} for trained, and the job goes on from step "
                f"{self.stream.step} to {len(self.stream)}: let the module's on_load_checkpoint call ServedModule's"
            )

    def steps(self) -> Iterator[Step]:
        """Those that are left, from the one whose update was not made.

        Raises:
            ValueError: Lightning has resumed a checkpoint that says nothing of the stream.
        """
        self._require_restored()
        self._go_to_untrained()
        for step in self.stream:
            self._last = _Given(step, self.trainer, *_progress(self.trainer))
            yield step

    def _require_restored(self) -> None:
        if self.trainer.ckpt_path and not self._restored:
            raise ValueError(
                f"{self.trainer.ckpt_path} has no state of {type(self).__qualname__}; the stream would begin at step "
                f"{self.stream.step}: resume a checkpoint that was saved with a data module of that name"
            )

    def _go_to_untrained(self) -> None:
        if self._last is not None:
            self.stream.go_to(self._next_step)
            self._last = None

    @property
    def _next_step(self) -> int:
        """The first whose update was not made. Lightning counts updates, and batches that made none."""
        last = self._last
        if last is None:
            return self.stream.step
        updates, batches = _progress(last.trainer)
        trained = updates > last.updates or (last.step.was_read and batches > last.batches)
        return last.step.number + trained


@dataclass(frozen=True, slots=True)
class _Given:
    """A step that a Trainer was handed, and what it had counted until then."""

    step: Step
    trainer: Trainer
    updates: int
    batches: int


class _Steps:
    """What Lightning takes for a loader that keeps its own state."""

    def __init__(self, data: ServedData) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data.stream)

    def __iter__(self) -> Iterator[Step]:
        return self._data.steps()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: it is part of the data's."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position that `state_dict` gave."""


class ServedModule(LightningModule):
    """A module that trains on served steps. Logs the step's `loss` and `data_wait_s`, seconds that this rank waited."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @abstractmethod
    def loss_of(self, microbatch: FullModelMicrobatch, text_tokens: int) -> Tensor:
        """A microbatch's share of the step's loss: the sum over its targets, divided by those of the whole step."""

    def training_step(self, step: Step) -> None:
        """Run a step, and update all parameters and learning rates. Clip in `on_before_optimizer_step`."""
        self.log("loss", self.run_step(step), reduce_fx="sum", sync_dist=True)
        for optimizer in _listed(self.optimizers()):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in _listed(self.lr_schedulers()):
            schedule.step()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is restored; where the job goes on behind it, so does Lightning's epoch."""
        try:
            data = self.trainer.datamodule
        except RuntimeError:  # read without a Trainer
            return
        state = checkpoint.get(type(data).__qualname__)
        if isinstance(data, ServedData) and state and state["step"] < len(data.stream):
            _reopen_epoch(checkpoint["loops"]["fit_loop"])

    def run_step(self, step: Step) -> Tensor:
        """Forward and backward of all microbatches of a step; gradients are summed over ranks with the last one.

        Returns:
            This rank's share of the loss; the loss of the step is its sum over ranks.

        Raises:
            ValueError: the stream was not given to Lightning as ServedData.
        """
        if not isinstance(self.trainer.datamodule, ServedData):
            raise ValueError(
                "the stream was given to Lightning as it is, which would lose its state: call "
                "trainer.fit(module, ServedData(stream))"
            )
        self.zero_grad()  # of a step that an exception has cut short
        trainer, loss, wait_s = self.trainer, torch.zeros((), device=self.device), 0.0
        for number, microbatch in enumerate(step.microbatches):
            last = number + 1 == step.num_microbatches
            with nullcontext() if last or trainer.world_size == 1 else trainer.strategy.block_backward_sync():
                share = self.loss_of(microbatch, step.text_tokens)
                self.manual_backward(share * trainer.world_size)  # DDP divides by it
            loss += share.detach()
            wait_s += microbatch.wait_s
        self.log("data_wait_s", wait_s)
        return loss


def _listed(found: Any) -> list[Any]:
    """Lightning gives one alone, several as a list, and none as None."""
    return found if isinstance(found, list) else [] if found is None else [found]


def _progress(trainer: Trainer) -> tuple[int, int]:
    """Updates, and batches that were run to their end."""
    return trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.processed


def _reopen_epoch(loop: dict[str, Any]) -> None:
    """Make of the state of a loop, which may have ended its epoch, that of one behind a batch in its middle."""
    progress = loop["epoch_progress"]
    ended = progress["current"]["processed"]
    for counts in (progress["current"], progress["total"]) if ended else ():
        counts["processed"] -= ended
        counts["completed"] = min(counts["completed"], counts["processed"])
    loop["epoch_loop.batch_progress"]["is_last_batch"] = False


def _check_trainer(trainer: Trainer, stream: FullModelStream) -> None:
    num_steps, strategy = len(stream), trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise ValueError(
            f"the strategy is {type(strategy).__name__}; strategies that shard the model would hang where only "
            "some ranks have images in a microbatch: set strategy to ddp_find_unused_parameters_true, or use "
            "`trainclient train`"
        )
    if stream.encoder is not None and trainer.world_size > 1 and not strategy._ddp_kwargs.get("find_unused_parameters"):
        raise ValueError(
            "DDP would wait for gradients of the encoder where the last microbatch of a rank has no images: set "
            "strategy to ddp_find_unused_parameters_true"
        )
    if trainer.lightning_module.automatic_optimization:
        raise ValueError(
            "the module optimizes automatically, each time for one or a fixed number of microbatches: derive it from "
            "ServedModule"
        )
    if trainer.max_epochs != 1 and not 0 <= trainer.max_steps <= num_steps:
        raise ValueError(
            f"the job ends after {num_steps} steps, with max_epochs {trainer.max_epochs} and max_steps "
            f"{trainer.max_steps}: set max_epochs to 1 or max_steps to at most {num_steps}, and execution.end to train "
            "longer"
        )
