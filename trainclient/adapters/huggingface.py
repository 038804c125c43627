"""Hugging Face's Trainer over the stream: its steps are the job's, and so are their denominators.

    args = TrainingArguments("out", num_train_epochs=1)
    stream = WholeRankStream("data-0:50051", "job.yaml", rank=args.process_index, world_size=args.world_size)
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

from dataserver.planning.job import Execution
from trainclient.adapters.state_file import read_state, write_state
from trainclient.adapters.versions import require
from trainclient.adapters.whole_rank import Step, WholeMicrobatch, WholeRankStream

require("transformers", "5", "6")
require("accelerate", "1.1", "2")
from transformers import Trainer, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

Inputs = Callable[[WholeMicrobatch, torch.device], dict[str, Any]]
"""From a microbatch to the model's arguments on a device."""


class ServedTrainer(Trainer):
    """A Trainer that trains on a stream. Evaluation is the Trainer's own."""

    def __init__(
        self, model: nn.Module, args: TrainingArguments, *, stream: WholeRankStream, inputs: Inputs, **options: Any
    ) -> None:
        """Make a trainer.

        Sets `ignore_data_skip`: the stream itself begins at the right step.

        Args:
            model: must take `num_items_in_batch`, as causal models of transformers do.
            args: without gradient accumulation.
            stream: of this rank.
            inputs: makes the model's arguments.
            options: others of Trainer, but for its training data.

        Raises:
            ValueError: arguments that contradict the job.
        """
        stream.require_place(args.process_index, args.world_size)
        _check_arguments(args, stream)
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
        self._ahead = 0
        """Number of the job's step over that of the Trainer's."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """See Trainer; the stream goes on where it was when the checkpoint was written.

        Raises:
            ValueError: the checkpoint says nothing of the stream.
            StateError: it belongs to another stream.
        """
        checkpoint = resume_from_checkpoint
        if isinstance(checkpoint, bool):
            checkpoint = self._last_checkpoint() if checkpoint else None
        if checkpoint is not None:
            self.stream.load_state_dict(read_state(Path(checkpoint), "resume from an earlier one"))
        return super().train(checkpoint, *args, **options)

    def get_train_dataloader(self) -> Any:
        """The stream, as it is: accelerate neither wraps nor shards it again."""
        return self.stream

    def get_batch_samples(
        self, epoch_iterator: Iterator[Step], num_batches: int, device: torch.device
    ) -> tuple[list[Step], Tensor | int | None]:
        """The next step, and the denominator of its loss; nothing behind the last one."""
        steps, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not steps:
            return steps, count
        self._ahead = steps[0].number - self.state.global_step
        return steps, torch.tensor(steps[0].text_tokens, device=device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | int | None:
        """The job knows it."""
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
        """See Trainer; with a loss goes `data_wait_s`, seconds that this rank waited for data since the last one."""
        if "loss" in logs:
            wait_s = self.stream.wait_s
            logs, self._told_wait_s = {**logs, "data_wait_s": wait_s - self._told_wait_s}, wait_s
        super().log(logs, *args, **options)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of a step that was trained on, or of a batch of evaluation."""
        return self._step_flops if isinstance(inputs, Step) else super().floating_point_ops(inputs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """See Trainer; the state of the stream behind the updates that were made goes into every checkpoint, also of
        one that SIGTERM asks for in the middle of a step (`enable_jit_checkpoint`)."""
        super()._save_checkpoint(model, trial)
        if self.is_world_process_zero():
            folder = Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            write_state(folder, {**self.stream.state_dict(), "step": self.state.global_step + self._ahead})

    def _last_checkpoint(self) -> str:
        found: str | None = get_last_checkpoint(self.args.output_dir)  # type: ignore[no-untyped-call]
        if found is None:
            raise ValueError(
                f"{self.args.output_dir} has no checkpoint to resume from; leave resume_from_checkpoint out"
            )
        return found


def _check_arguments(args: TrainingArguments, stream: WholeRankStream) -> None:
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}; how many microbatches a step has, the "
            "job says (stream.global_batch over dp and execution.microbatch): leave it at 1"
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices is False; the denominator counts the targets of all ranks: leave it at True"
        )
    sharing: Any = args.accelerator_config
    if sharing.dispatch_batches or sharing.split_batches:
        raise ValueError(
            "accelerator_config has dispatch_batches or split_batches, by which one rank would read and share out what "
            "all have their own of, in unequal shapes: leave both out"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"this process has {args.n_gpu} GPUs, to which the Trainer would share out what is one rank's: start a "
            f"process for each with torchrun --nproc-per-node {args.n_gpu}"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size would begin again, with batches that were read already: leave it out, and set "
            "execution.microbatch or the modules' memory"
        )
    if args.include_num_input_tokens_seen != "no":
        raise ValueError(
            "include_num_input_tokens_seen counts the tokens of a batch, which is a step of several microbatches here: "
            'leave it at "no"'
        )
    if args.max_steps > len(stream) or (args.max_steps < 0 and args.num_train_epochs != 1):
        raise ValueError(
            f"the job ends after {len(stream)} steps, and max_steps is {args.max_steps} with num_train_epochs "
            f"{args.num_train_epochs}: set num_train_epochs to 1 or max_steps to at most {len(stream)}, and "
            "execution.end to train longer"
        )


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
