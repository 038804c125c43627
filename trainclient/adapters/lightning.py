"""Lightning's Trainer over the stream, whose state is part of Lightning's own checkpoints.

    trainer.fit(module, ServedData(stream), ckpt_path="last")

One batch is a step of this rank with all its microbatches, whose number may differ from step to step. So the module
optimizes by hand, as `ServedModule` does.
"""

from abc import abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainclient.adapters.versions import require
from trainclient.adapters.whole_rank import Step, WholeMicrobatch, WholeRankStream

require("lightning", "2.5", "3")
from lightning import LightningDataModule, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy  # noqa: E402


class ServedData(LightningDataModule):
    """The stream of this rank as training data. Lightning saves and restores its state, since it has `state_dict`."""

    def __init__(self, stream: WholeRankStream) -> None:
        super().__init__()
        self.stream = stream

    def setup(self, stage: str) -> None:
        """Called before training; ValueError if Trainer or module contradict the job."""
        if stage == "fit":
            self.stream.require_place(self.trainer.global_rank, self.trainer.world_size)
            _check_trainer(self.trainer, self.stream)

    def train_dataloader(self) -> WholeRankStream:
        """The stream, as it is: Lightning shards nothing but a DataLoader."""
        return self.stream


class ServedModule(LightningModule):
    """A module that trains on served steps. Logs the step's `loss` and `data_wait_s`, seconds that this rank waited."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    @abstractmethod
    def loss_of(self, microbatch: WholeMicrobatch, text_tokens: int) -> Tensor:
        """A microbatch's share of the step's loss: the sum over its targets, divided by those of the whole step."""

    def training_step(self, step: Step) -> None:
        """Run a step, and update all parameters and learning rates. Clip in `on_before_optimizer_step`."""
        self.log("loss", self.run_step(step), reduce_fx="sum", sync_dist=True)
        for optimizer in _listed(self.optimizers()):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in _listed(self.lr_schedulers()):
            schedule.step()

    def run_step(self, step: Step) -> Tensor:
        """Forward and backward of all microbatches of a step; gradients are summed over ranks with the last one.

        Returns:
            This rank's share of the loss; the loss of the step is its sum over ranks.
        """
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


def _check_trainer(trainer: Trainer, stream: WholeRankStream) -> None:
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
