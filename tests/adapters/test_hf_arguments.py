"""Which arguments of Hugging Face's Trainer are understood; all others only at their defaults."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments

from trainclient.adapters.hf_arguments import OPTIONS, REFUSED, UNDERSTOOD, check_arguments, check_options, defaults_of

FITS: dict[str, Any] = {"num_train_epochs": 1, "report_to": "none", "use_cpu": True}


def check(folder: Path, kind: type[TrainingArguments] = TrainingArguments, **given: Any) -> None:
    check_arguments(kind(str(folder), **{**FITS, **given}), num_steps=6)


@dataclass
class Later(Seq2SeqTrainingArguments):
    """Of a release that is to come."""

    auxiliary_loss_weight: float = 0.0
    curriculum: list[str] = field(default_factory=list)


def test_every_argument_of_this_release_is_known() -> None:
    """Whoever adds one to a table has looked at what it does."""
    assert not UNDERSTOOD & REFUSED.keys()
    assert {f.name for f in fields(Seq2SeqTrainingArguments)} <= UNDERSTOOD | REFUSED.keys()
    parameters = set(Trainer.__init__.__code__.co_varnames[: Trainer.__init__.__code__.co_argcount])
    assert parameters - OPTIONS == {"self", "model", "args", "train_dataset", "model_init"}


def test_arguments_without_effect_on_what_is_learned(tmp_path: Path) -> None:
    check(tmp_path)
    check(tmp_path, Later, predict_with_generate=True)
    usual = {"bf16": True, "warmup_steps": 2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}
    saved = {"save_total_limit": 1, "save_only_model": True, "logging_steps": 1, "seed": 3, "dataloader_num_workers": 2}
    check(tmp_path, **usual, **saved, gradient_checkpointing=True, accelerator_config={"even_batches": False})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor is 0\.1; .*leave it at 0"),
        ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha is 5\.0; .*leave it out"),
        ({"use_liger_kernel": True}, r"use_liger_kernel is True; .*leave it out"),
        ({"use_cache": True}, r"packed samples see each other: leave it at False"),
        ({"per_device_train_batch_size": 2}, r"per_device_train_batch_size is 2; .*execution\.microbatch"),
        ({"data_seed": 3}, r"data_seed is 3; .*set stream\.seed"),
        ({"train_sampling_strategy": "group_by_length"}, r"plans balance sizes by themselves"),
        ({"ddp_static_graph": True}, r"ddp_static_graph is True; "),
        ({"optim": "lomo"}, r"optim is lomo, which updates with every microbatch"),
        ({"optim": "galore_adamw_layerwise"}, r"optim is galore_adamw_layerwise"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, r"'num_steps': 4.*leave them out"),
        ({"accelerator_config": {"split_batches": True}}, r"split_batches.*leave both out"),
        (
            {"kind": Later, "auxiliary_loss_weight": 0.5},
            r"auxiliary_loss_weight is 0\.5; this adapter.*leave it at 0\.0",
        ),
        ({"kind": Later, "curriculum": ["long"]}, r"curriculum is \['long'\]; .*a class of their own"),
        ({"kind": Later, "sortish_sampler": True}, r"sortish_sampler is True"),
    ],
)
def test_arguments_that_change_what_is_learned(tmp_path: Path, given: dict[str, Any], says: str) -> None:
    """Or that are not known."""
    with pytest.raises(ValueError, match=says):
        check(tmp_path, **given)


def test_defaults_are_those_of_the_class(tmp_path: Path) -> None:
    found = defaults_of(Later(str(tmp_path), **FITS))
    assert (found["auxiliary_loss_weight"], found["curriculum"], found["learning_rate"]) == (0.0, [], 5e-5)


def test_options_of_the_trainer() -> None:
    check_options({"callbacks": [], "compute_metrics": len, "train_dataset": None})
    with pytest.raises(ValueError, match=r"train_dataset was given, and the stream is what is trained on: leave"):
        check_options({"train_dataset": [1]})
    with pytest.raises(ValueError, match="formatting_func was given, which this adapter does not know"):
        check_options({"formatting_func": len})
