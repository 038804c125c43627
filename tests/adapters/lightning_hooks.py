"""Wherever Lightning saves, a resumed run is the one that nobody disturbed: lightning_hooks.py SERVER FOLDER."""

import logging
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.whole_jobs import text_job
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream
from trainclient.adapters.lightning import ServedData, ServedModule

SERVER, FOLDER = sys.argv[1], Path(sys.argv[2])
SHORT, LONG = 4, 6
"""Steps of the job that is saved, and of the one that resumes it."""
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": FOLDER}


class StopError(Exception):
    """What some hook raises."""


class Tiny(ServedModule):
    """Notes the step of each microbatch; its schedule goes by the Trainer's estimate, which asks for loaders early."""

    def __init__(self, raises: Callable[[FullModelMicrobatch], bool] = lambda _: False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.raises, self.used = nn.Embedding(300, 8), raises, list[int]()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        assert self.trainer.estimated_stepping_batches in (1, SHORT, LONG)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def loss_of(self, microbatch: FullModelMicrobatch, text_tokens: int) -> Tensor:
        self.used.append(microbatch.backbone.step)
        if self.raises(microbatch):
            raise StopError
        ids, labels = (torch.from_numpy(microbatch.tensors[name]).long() for name in ("token_ids", "labels"))
        return cross_entropy(self.text(ids) @ self.text.weight.T, labels, reduction="sum") / text_tokens

    def validation_step(self, _: Any) -> None:
        """Of some loader."""


def fit(
    steps: int,
    module: Tiny,
    *callbacks: Callback,
    resume: Path | str | None = None,
    kind: Any = ServedData,
    **options: Any,
) -> Tiny:
    job = text_job()
    job["execution"]["end"] = {"steps": steps}
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **{**QUIET, "max_epochs": 1, **options})
    with FullModelStream(SERVER, job, rank=0, world_size=1) as stream:
        data = kind(stream)
        if "val_check_interval" in options:
            data.val_dataloader = lambda: DataLoader([0, 1])
        trainer.fit(module, data, ckpt_path=resume)
    return module


class Saves(Callback):
    """In one hook, once it is called behind so many updates; then it may raise."""

    def __init__(self, hook: str, file: Path, updates: int, raises: bool) -> None:
        self.file, self.updates, self.raises = file, updates, raises
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self.updates and not self.file.exists():
            trainer.save_checkpoint(self.file)
            if self.raises:
                raise StopError


def require_same(resumed: Tiny, calm: Tiny, begins: int) -> None:
    assert sorted(set(resumed.used)) == list(range(begins, LONG)), (resumed.used, begins)
    assert resumed.trainer.global_step == LONG
    torch.testing.assert_close(resumed.state_dict(), calm.state_dict(), rtol=0, atol=0)


def wherever_it_saves(calm: Tiny) -> None:
    """Hooks, updates that were made when they saved, and the step to go on with."""
    hooks = [
        ("on_train_batch_start", 2, 2), ("on_before_optimizer_step", 2, 2), ("on_train_batch_end", 1, 1),
        ("on_train_batch_end", SHORT, SHORT), ("on_train_epoch_end", 0, SHORT), ("on_train_end", 0, SHORT),
        ("on_validation_start", 2, 2), ("on_validation_end", 2, 2), ("on_validation_end", SHORT, SHORT),
    ]  # fmt: skip
    for hook, updates, begins in hooks:
        for raises in (False, True):
            file = FOLDER / f"{hook}-{updates}-{raises}.ckpt"
            options = {"val_check_interval": 2} if "validation" in hook else {}
            with suppress(StopError):
                fit(SHORT, Tiny(), Saves(hook, file, updates, raises), **options)
            require_same(fit(LONG, Tiny(), resume=file, **options), calm, begins)


def on_exceptions(calm: Tiny) -> None:
    """In the first, one of the, and the last microbatch of a step, and in the optimizer."""
    moments = {
        "first": lambda m: m.backbone.step == 2 and m.backbone.microbatch == 0,
        "last": lambda m: m.backbone.step == 3 and m.backbone.last_of_step,
    }
    for name, raises in moments.items():
        with suppress(StopError):
            fit(SHORT, failing := Tiny(raises), OnExceptionCheckpoint(FOLDER, name))
        require_same(fit(LONG, Tiny(), resume=FOLDER / f"{name}.ckpt"), calm, failing.used[-1])


def from_the_last_of_its_own(calm: Tiny) -> None:
    """As the documentation's example, begun twice."""
    saves = {"every_n_train_steps": 2, "save_last": True}
    for steps, begins in ((SHORT, 0), (LONG, SHORT)):
        resumed = fit(steps, Tiny(), ModelCheckpoint(FOLDER / "last", **saves), resume="last")
        assert min(resumed.used) == begins
    require_same(resumed, calm, SHORT)


def again_in_one_process() -> None:
    """After an exception the step begins anew, without the gradients of its first part."""
    job, failed = text_job(), list[int]()
    job["execution"]["end"] = {"steps": LONG}

    def once(microbatch: FullModelMicrobatch) -> bool:
        failed.append(microbatch.backbone.step)
        return len(failed) == 2

    module = Tiny(once)
    with FullModelStream(SERVER, job, rank=0, world_size=1) as stream:
        data = ServedData(stream)
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET)
        with suppress(StopError):
            trainer.fit(module, data)
        assert any(p.grad is not None for p in module.parameters())
        module.used.clear()
        trainer.fit(module, data)
    assert sorted(set(module.used)) == list(range(LONG))
    torch.testing.assert_close(module.state_dict(), fit(LONG, Tiny()).state_dict(), rtol=0, atol=0)


class Renamed(ServedData):
    """Of another name than that of the checkpoint."""


class Forgets(Tiny):
    """With a hook of its own."""

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        pass


def refused() -> None:
    """Each in a line that says what to do."""
    file = FOLDER / "on_train_epoch_end-0-False.ckpt"
    cases: dict[str, Callable[[], object]] = {
        "has no state of Renamed": lambda: fit(LONG, Tiny(), resume=file, kind=Renamed),
        "on_load_checkpoint call ServedModule's": lambda: fit(LONG, Forgets(), resume=file),
        "call trainer.fit(module, ServedData(stream))": lambda: fit(SHORT, Tiny(), kind=lambda stream: stream),
        "overfit_batches is 2; ": lambda: fit(SHORT, Tiny(), overfit_batches=2),
        "limit_train_batches is 1; ": lambda: fit(SHORT, Tiny(), limit_train_batches=1),
        "limit_train_batches is 0.5; ": lambda: fit(SHORT, Tiny(), limit_train_batches=0.5),
        "reload_dataloaders_every_n_epochs is 1; ": lambda: fit(SHORT, Tiny(), reload_dataloaders_every_n_epochs=1),
    }
    for says, call in cases.items():
        with pytest.raises(ValueError, match=re.escape(says)):
            call()
    fit(SHORT, Tiny(), fast_dev_run=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    undisturbed = fit(LONG, Tiny())
    wherever_it_saves(undisturbed)
    on_exceptions(undisturbed)
    from_the_last_of_its_own(undisturbed)
    again_in_one_process()
    refused()
