"""Which arguments of Lightning's Trainer a served module understands: a closed list, so that none is ignored.

A Trainer does not keep its arguments, so those that matter are read where it puts them. An argument in neither table,
as of a later release, is refused unless the Trainer has its default under the argument's name.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

_UNDERSTOOD = """
    accelerator barebones benchmark callbacks check_val_every_n_epoch default_root_dir detect_anomaly deterministic
    devices enable_autolog_hparams enable_checkpointing enable_model_summary enable_progress_bar fast_dev_run
    gradient_clip_algorithm inference_mode limit_predict_batches limit_test_batches limit_val_batches log_every_n_steps
    logger max_epochs max_steps max_time min_epochs min_steps model_registry num_nodes num_sanity_val_steps plugins
    precision profiler strategy use_distributed_sampler val_check_interval
    """
UNDERSTOOD: Final = frozenset(_UNDERSTOOD.split())
"""Arguments without effect on what a step learns from, of evaluation alone, or looked at more closely where it
matters."""

_Reader = Callable[[Any], Any]


def _unless(name: str, *defaults: Any) -> _Reader:
    """Reads an attribute of that name; None where it is at a default, or not there."""

    def read(trainer: Any) -> Any:
        found = getattr(trainer, name, defaults[0])
        return None if found in defaults else found

    return read


def _limit(trainer: Any) -> Any:
    """1.0 is all batches, and 1 is one, which `fast_dev_run` sets, too."""
    found = getattr(trainer, "limit_train_batches", 1.0)
    whole = isinstance(found, float) and found == 1
    return None if whole or getattr(trainer, "fast_dev_run", False) else found


REFUSED: Final[Mapping[str, tuple[_Reader, str]]] = {
    "accumulate_grad_batches": (
        _unless("accumulate_grad_batches", 1),
        "how many microbatches a step has, the job says: leave it at 1",
    ),
    "gradient_clip_val": (
        _unless("gradient_clip_val", None, 0),
        "the module optimizes by hand: clip in on_before_optimizer_step",
    ),
    "overfit_batches": (
        _unless("overfit_batches", 0),
        "the job says which samples a step has: leave it out, and train on few samples with a filter of the job",
    ),
    "limit_train_batches": (_limit, "Lightning would take the job for trained behind them: set max_steps"),
    "reload_dataloaders_every_n_epochs": (
        _unless("reload_dataloaders_every_n_epochs", 0),
        "the job is one epoch: leave it out",
    ),
    "sync_batchnorm": (
        lambda trainer: getattr(trainer.strategy, "_layer_sync", None) and True,
        "ranks would wait for each other where only some have images: leave it out",
    ),
}
"""How to read an argument, None where it is at its default, and why it may only have that, with what to do."""


def check_trainer_arguments(trainer: Any) -> None:
    """Refuse a Trainer with arguments that are not understood with ValueError."""
    for name, (value_of, reason) in REFUSED.items():
        if (value := value_of(trainer)) is not None:
            raise ValueError(f"{name} is {value}; {reason}")
    for name, parameter in inspect.signature(type(trainer).__init__).parameters.items():
        if name == "self" or name in UNDERSTOOD or name in REFUSED or parameter.default is parameter.empty:
            continue
        if (value := getattr(trainer, name, parameter.default)) != parameter.default:
            raise ValueError(
                f"{name} is {value!r}; this adapter does not know whether that changes what a step learns: leave it at "
                f"{parameter.default!r}"
            )
