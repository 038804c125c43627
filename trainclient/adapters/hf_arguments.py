"""Which arguments of Hugging Face's Trainer a served one understands: a closed list, so that none is ignored.

An argument in neither table is refused unless it is at its default, also one of a later release.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Final

_UNDERSTOOD = """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
    batch_eval_metrics bf16 bf16_full_eval dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
    dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug disable_tqdm do_eval
    do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start
    eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism
    generation_config generation_max_length generation_num_beams gradient_checkpointing gradient_checkpointing_kwargs
    greater_is_better hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    ignore_data_skip include_for_metrics label_names learning_rate length_column_name load_best_model_at_end
    local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step logging_nan_inf_filter
    logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model
    num_train_epochs optim optim_args optim_target_modules output_dir parallelism_config per_device_eval_batch_size
    predict_with_generate prediction_loss_only project push_to_hub remove_unused_columns report_to
    restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node save_only_model
    save_steps save_strategy save_total_limit seed skip_memory_metrics tf32 torch_compile torch_compile_backend
    torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id use_cpu
    warmup_ratio warmup_steps weight_decay
    """
UNDERSTOOD: Final = frozenset(_UNDERSTOOD.split())
"""Arguments without effect on what a step learns from, of evaluation alone, or looked at more closely where it
matters."""

_READS = "the job says which samples a step has, and in which order"
REFUSED: Final[Mapping[str, str]] = {
    "auto_find_batch_size": "it would begin again, with batches that were read already: leave it out, and set "
    "execution.microbatch or the modules' memory",
    "average_tokens_across_devices": "the denominator counts the targets of all ranks: leave it at True",
    "data_seed": f"{_READS}: set stream.seed",
    "ddp_static_graph": "microbatches with and without images use other parameters: leave it out",
    "deepspeed": "deepspeed was never tried with this adapter: shard the model with fsdp, or not at all",
    "gradient_accumulation_steps": "how many microbatches a step has, the job says (stream.global_batch over dp and "
    "execution.microbatch): leave it at 1",
    "group_by_length": f"{_READS}: leave it out, plans balance sizes by themselves",
    "include_num_input_tokens_seen": "it counts the tokens of a batch, which is a step of several microbatches here: "
    'leave it at "no"',
    "label_smoothing_factor": "the Trainer would take the loss from labels as they are, not of the token before, and "
    "in some releases a mean of each microbatch: leave it at 0, or smooth in the model's own loss",
    "liger_kernel_config": "see use_liger_kernel: leave it out",
    "neftune_noise_alpha": "its noise depends on how long rows are, which the plan decides: leave it out",
    "per_device_train_batch_size": "how many samples a microbatch has, the job says (execution.microbatch, "
    "stream.seq_len): leave it out",
    "sortish_sampler": f"{_READS}: leave it out",
    "train_sampling_strategy": f"{_READS}: leave it out, plans balance sizes by themselves",
    "use_cache": "with a cache packed samples see each other: leave it at False",
    "use_liger_kernel": "its losses were never compared with the model's own over packed steps: leave it out",
}
"""Why an argument may only have its default, and what to do."""

_OPTIONS = """
    callbacks compute_loss_func compute_metrics data_collator eval_dataset optimizer_cls_and_kwargs optimizers
    preprocess_logits_for_metrics processing_class
    """
OPTIONS: Final = frozenset(_OPTIONS.split())
"""Options of the Trainer itself. `compute_loss_func` is given the step's denominator as `num_items_in_batch`, to divide
by."""

_PER_BACKWARD: Final = ("lomo", "adalomo")
_ACCELERATOR: Final = frozenset({"even_batches", "non_blocking", "use_configured_state", "use_seedable_sampler"})


def check_arguments(args: Any, num_steps: int) -> None:
    """Refuse TrainingArguments that are not understood, or contradict the job, with ValueError.

    Args:
        args: these, of any release or class derived from them.
        num_steps: of the job.
    """
    for name, default in defaults_of(args).items():
        value = getattr(args, name, default)
        if name not in UNDERSTOOD and value != default:
            raise ValueError(f"{name} is {value!r}; {REFUSED.get(name) or _unknown(name, default)}")
    _check_accelerator(args.accelerator_config)
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer in _PER_BACKWARD or optimizer.endswith("layerwise"):
        raise ValueError(
            f"optim is {optimizer}, which updates with every microbatch, not with every step: take one that updates "
            "all parameters at once"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"this process has {args.n_gpu} GPUs, to which the Trainer would share out what is one rank's: start a "
            f"process for each with torchrun --nproc-per-node {args.n_gpu}"
        )
    if args.max_steps > num_steps or (args.max_steps < 0 and args.num_train_epochs != 1):
        raise ValueError(
            f"the job ends after {num_steps} steps, and max_steps is {args.max_steps} with num_train_epochs "
            f"{args.num_train_epochs}: set num_train_epochs to 1 or max_steps to at most {num_steps}, and "
            "execution.end to train longer"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the Trainer's constructor that are not understood with ValueError."""
    for name in options.keys() - OPTIONS:
        if options[name] is None:
            continue
        if name == "train_dataset":
            raise ValueError("train_dataset was given, and the stream is what is trained on: leave it out")
        raise ValueError(f"{name} was given, which this adapter does not know: leave it out")


def defaults_of(args: Any) -> dict[str, Any]:
    """Return the default of each argument by its name."""
    found = dict[str, Any]()
    for field in fields(args):
        found[field.name] = field.default if field.default_factory is MISSING else field.default_factory()
    return found


def _unknown(name: str, default: Any) -> str:
    leave = "leave it out" if default is MISSING else f"leave it at {default!r}"
    return (
        f"this adapter does not know whether {name} changes what a step learns: {leave}, and keep arguments of your "
        "own script in a class of their own"
    )


def _check_accelerator(config: Any) -> None:
    if config.dispatch_batches or config.split_batches:
        raise ValueError(
            "accelerator_config has dispatch_batches or split_batches, by which one rank would read and share out what "
            "all have their own of, in unequal shapes: leave both out"
        )
    accumulation = config.gradient_accumulation_kwargs or {}
    if accumulation.get("num_steps", 1) != 1 or accumulation.keys() - {"num_steps"}:
        raise ValueError(
            f"accelerator_config has gradient_accumulation_kwargs {accumulation}; how many microbatches a step has, "
            "the job says: leave them out"
        )
    known = _ACCELERATOR | {"dispatch_batches", "split_batches", "gradient_accumulation_kwargs"}
    for name, default in defaults_of(config).items():
        if name not in known and getattr(config, name, default) != default:
            found = f"accelerator_config has {name} {getattr(config, name)!r}"
            raise ValueError(f"{found}, which this adapter does not know: leave it out")
