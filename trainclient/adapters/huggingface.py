"""Hugging Face's Trainer over the stream: its steps are the job's, and so are their denominators.

    args = TrainingArguments("out", num_train_epochs=1)
    stream = FullModelStream("data-0:50051", "job.yaml", rank=args.process_index, world_size=args.world_size)
    ServedTrainer(model, args, stream=stream, inputs=Qwen2VLInputs.of(model.config, stream.job.stream.sizing)).train()

One batch of the Trainer is a step of this rank with all its microbatches, whose number may differ from step to step. So
`gradient_accumulation_steps` stays 1, and nothing is left for accelerate to shard or to skip.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dataserver.planning.job.spec import Execution
from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream, Step
from trainclient.adapters.hf_arguments import check_arguments, check_options
from trainclient.adapters.saved_weights import WeightDigests
from trainclient.adapters.state_file import read_state, write_state
from trainclient.adapters.versions import require

require("transformers", "5", "6")
require("accelerate", "1.1", "2")
from transformers import PreTrainedModel, Trainer, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from trainclient.adapters.hf_checkpoints import begin_saving, read_whole, require_loaded  # noqa: E402

Inputs = Callable[[FullModelMicrobatch, torch.device], dict[str, Any]]
"""Makes a microbatch the model's arguments on a device."""


class ServedTrainer(Trainer):
    """A Trainer that trains on a stream. Evaluation is the Trainer's own."""

    def __init__(
        self, model: nn.Module, args: TrainingArguments, *, stream: FullModelStream, inputs: Inputs, **options: Any
    ) -> None:
        """Make a trainer.

        Sets `ignore_data_skip`: the stream itself begins at the right step.

        Args:
            model: must take `num_items_in_batch`, as causal models of transformers do.
            args: those that `hf_arguments` lists, others at their defaults.
            stream: of this rank.
            inputs: makes the model's arguments.
            options: others of Trainer, but for its training data.

        Raises:
            ValueError: arguments that contradict the job, or are not understood.
        """
        stream.require_rank_and_size(args.process_index, args.world_size)
        check_options(options)
        check_arguments(args, len(stream))
        args.ignore_data_skip = True
        super().__init__(model, args, **options)
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(model).__name__} takes no num_items_in_batch, so its loss would be a mean over its own tokens: "
                "let forward take it (**kwargs) and divide the sum of the loss by it"
            )
        _check_ranks(self, model, stream.job.spec.execution)
        self.stream = stream
        self._inputs = inputs
        self._step_flops, self._told_wait_s = 0, stream.wait_s
        self._ahead: int | None = None
        """Step of the job at the Trainer's update 0; None before it trains."""
        self._stepping = False
        """Whether the Trainer has gone from one step to the next since it began, so that both agree."""
        self._weights = WeightDigests(model)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as Trainer does; the stream goes on where it was when the checkpoint was written.

        When it ends with an exception, the stream stands at the step whose update was not made.

        Raises:
            ValueError: the checkpoint is not whole, or other tensors than it was saved with are loaded from it; or it
                is called again without a checkpoint when updates have been made.
            StateError: the checkpoint belongs to another stream.
        """
        checkpoint = resume_from_checkpoint
        if isinstance(checkpoint, bool):
            checkpoint = self._last_checkpoint() if checkpoint else None
        if checkpoint is not None:
            state, updates = read_whole(Path(checkpoint), self.is_fsdp_enabled)
            self.stream.load_state_dict(state)
            self._ahead = self.stream.step - updates
        elif self._ahead is None:
            self._ahead = self.stream.step
        self._stepping = False
        try:
            return super().train(checkpoint, *args, **options)
        except BaseException:
            if self._stepping:
                self.stream.go_to(self.state.global_step + self._ahead)
            raise

    def get_train_dataloader(self) -> Any:
        """The stream, as it is: accelerate neither wraps nor shards it again."""
        return self.stream

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: torch.device
    ) -> tuple[list[Step], Tensor | int | None]:
        """The next step, and the denominator of its loss; nothing behind the last one."""
        if self.stream.step - self.state.global_step != self._ahead:
            raise ValueError(
                f"the Trainer is at update {self.state.global_step}, and the stream at step {self.stream.step} where "
                f"{self.state.global_step + (self._ahead or 0)} would follow: train() has begun to count, and its "
                "learning rate, anew, or something else has read from the stream; resume from a checkpoint "
                "(resume_from_checkpoint), or begin with a new model, Trainer and stream"
            )
        self._stepping = True
        steps, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        return (steps, torch.tensor(steps[0].text_tokens, device=device)) if steps else (steps, count)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """None for steps of the stream, whose number of items the job knows."""
        served = not batch_samples or isinstance(batch_samples[0], Step)
        return None if served else super()._get_num_items_in_batch(batch_samples, device)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward of all microbatches of a step; gradients are summed over ranks with the last one,
        of sharded models with each."""
        step, loss = inputs, torch.zeros((), device=self.args.device)
        self._step_flops = 0
        for number, microbatch in enumerate(step.microbatches):
            batch = self._inputs(microbatch, self.args.device)
            # shards are summed at once: those that the last microbatch does not use would not be summed later
            sums = self.is_fsdp_enabled or number + 1 == step.num_microbatches
            with nullcontext() if sums else self.accelerator.no_sync(model=model):
                loss += super().training_step(model, batch, num_items_in_batch)
            self._step_flops += super().floating_point_ops(batch)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **options: Any) -> None:
        """Log as Trainer does; with a loss goes `data_wait_s`, seconds that this rank waited for data since the last
        one."""
        if "loss" in logs:
            wait_s = self.stream.wait_s
            logs, self._told_wait_s = {**logs, "data_wait_s": wait_s - self._told_wait_s}, wait_s
        super().log(logs, *args, **options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Operations of a step that was trained on, or of a batch of evaluation."""
        return self._step_flops if isinstance(inputs, Step) else super().floating_point_ops(inputs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """See Trainer; the state of the stream behind the updates that were made goes into every checkpoint, also of
        one that SIGTERM asks for in the middle of a step (`enable_jit_checkpoint`), with what tells the weights."""
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            begin_saving(folder)
            # sharded weights are loaded by the model's own names, all or none
            weights = {} if self.is_fsdp_enabled else {"weights": self._weights.now()}
            step = self.state.global_step + (self._ahead or 0)
            write_state(folder, {**self.stream.state_dict(), "step": step, **weights})
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """See Trainer, which goes on where tensors are missing; ValueError if the model has others than were saved."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._require_loaded(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._require_loaded(str(self.state.best_model_checkpoint))

    def _require_loaded(self, checkpoint: str) -> None:
        saved = read_state(Path(checkpoint), "resume from another one").get("weights")
        if saved is not None and not self.is_fsdp_enabled:
            model: Any = self.model
            require_loaded(model, Path(checkpoint), saved)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Nothing: every tensor is compared behind this."""
        if load_result.missing_keys and isinstance(self.model, PreTrainedModel):
            self.model.tie_weights()

    def _last_checkpoint(self) -> str:
        found: str | None = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        if found is None:
            raise ValueError(
                f"{self.args.output_dir} has no checkpoint to resume from; leave resume_from_checkpoint out"
            )
        return found


def _check_ranks(trainer: Trainer, model: nn.Module, execution: Execution) -> None:
    """Refuse what accelerate was told by arguments, the model or its launcher, and ranks with data of their own cannot.

    Raises:
        ValueError: ranks that share a model or its sequences, or wait for gradients that some do not have.
    """
    accelerator, images = trainer.accelerator, any(m.handles_images for m in execution.modules)
    sharded = trainer.is_fsdp_enabled or any(isinstance(m, FSDPModule) for m in model.modules())
    parallel = getattr(accelerator, "parallelism_config", None)
    if parallel is not None and parallel.non_data_parallel_size > 1:
        raise ValueError(
            f"{parallel.non_data_parallel_size} processes share a model or its sequences, and would have to read the "
            "same: leave tensor, context and sequence parallelism out, or use `trainclient train`"
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError("deepspeed was never tried with this adapter: shard the model with fsdp, or not at all")
    if sharded and images and not execution.modality_parity:
        raise ValueError(
            "the model is sharded (fsdp), and its collectives would wait for ever where only some ranks have images in "
            "a microbatch: set execution.modality_parity to true"
        )
    if images and not sharded and trainer.args.world_size > 1 and not accelerator.ddp_handler.find_unused_parameters:
        raise ValueError(
            "DDP would wait for gradients of the encoder where the last microbatch of a rank has no images: set "
            "ddp_find_unused_parameters to True (the Trainer leaves it out with gradient checkpointing)"
        )
