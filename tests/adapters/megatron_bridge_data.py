"""Megatron-Bridge's own functions over our provider, on a CPU: megatron_bridge_data.py SERVER FOLDER.

They fire callbacks, build data sets and iterators, and take batches apart for its step of GPT.
"""

import inspect
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import transformers  # noqa: F401  before what stands for packages that it looks for
from adapters import cuda_on_cpu, tiny_mimo  # noqa: F401
from adapters.whole_jobs import one_pass, text_job, whole_job

cuda_on_cpu.pretend()
# Packages for GPUs and other data sets, which it imports and which nothing here needs.
ABSENT = "datasets einops megatron.energon modelopt.torch.distill.plugins.megatron omegaconf transformer_engine.pytorch"
# Packages whose face imports every model that Bridge knows.
FACES = "megatron.bridge", "megatron.bridge.data", "megatron.bridge.training"


def stand_in(name: str, module: ModuleType | MagicMock, path: list[str]) -> None:
    module.__path__, module.__spec__ = path, ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module


import megatron.training.models  # noqa: E402, F401  before Transformer Engine seems to be there

(bridge,) = find_spec("megatron.bridge").submodule_search_locations
for face in FACES:
    stand_in(face, ModuleType(face), [str(Path(bridge, *face.split(".")[2:]))])
for absent in ABSENT.split():
    parts = absent.split(".")
    for end in range(1, len(parts) + 1):
        if ".".join(parts[:end]) not in sys.modules and parts[:end] != ["megatron"]:
            stand_in(".".join(parts[:end]), MagicMock(), [])
from megatron.bridge.data.loaders import build_train_valid_test_data_iterators  # noqa: E402
from megatron.bridge.data.utils import get_dataset_provider  # noqa: E402
from megatron.bridge.models.megatron_mimo.megatron_mimo_provider import MegatronMIMOInfra  # noqa: E402
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager  # noqa: E402
from megatron.bridge.training.gpt_step import get_batch_from_iterator  # noqa: E402
from megatron.bridge.training.state import TrainState  # noqa: E402
from megatron.bridge.training.utils.train_utils import prepare_forward_step_func  # noqa: E402
from megatron.core.models.mimo import MimoModel  # noqa: E402
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY  # noqa: E402
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402
from megatron.core.timers import Timers  # noqa: E402

from trainclient.adapters.megatron_bridge import ServedProvider  # noqa: E402
from trainclient.adapters.megatron_mimo import ServedMimoProvider, forward_step  # noqa: E402
from trainclient.stream.errors import StateError  # noqa: E402

MICROBATCHES = 20


def start(server: str, folder: Path, step: int, seed: int) -> list[list[int]]:
    """The tokens of a run's first microbatches, as Bridge's step reads them."""
    provider = ServedProvider(servers=server, job=text_job(seed))
    cfg = SimpleNamespace(
        dataset=provider,
        model=SimpleNamespace(seq_length=256),
        checkpoint=SimpleNamespace(load=str(folder), save=str(folder)),
        train=SimpleNamespace(
            train_samples=None, train_iters=3, global_batch_size=MICROBATCHES, micro_batch_size=1, num_epochs=None,
            exit_signal=None, exit_signal_handler_for_dataloader=False,
        ),
        validation=SimpleNamespace(
            eval_interval=None, eval_iters=0, eval_global_batch_size=None, eval_micro_batch_size=None, skip_train=False
        ),
    )  # fmt: skip
    state = TrainState(step=step)
    callbacks = CallbackManager()
    callbacks.add(provider.begins())
    callbacks.fire("on_data_init_start", CallbackContext(SimpleNamespace(train_state=state, cfg=cfg), []))
    groups = SimpleNamespace(dp=dist.group.WORLD, pp=dist.group.WORLD)
    build = partial(get_dataset_provider(provider), tokenizer=None, pg_collection=groups)
    iterator, *others = build_train_valid_test_data_iterators(cfg, state, build, dist.group.WORLD)
    assert others == [None, None]
    assert state.do_train
    found = []
    for _ in range(MICROBATCHES * (2 - step)):
        batch = get_batch_from_iterator(iterator, is_first_pp_stage=True, is_last_pp_stage=True)
        assert batch["labels"].shape == batch["loss_mask"].shape == batch["position_ids"].shape == (1, 256)
        assert batch["cu_seqlens"].shape[1] == int(batch["cu_seqlens_argmin"])
        assert not batch["max_seqlen"].is_cuda
        found.append(batch["tokens"][0].tolist())
    return found


class Grid:
    """Of the modules' data-parallel ranks; here all others' are missing."""

    rank_offset, size = 0, 1

    def get_pg(self, _: list[str]) -> SimpleNamespace:
        return SimpleNamespace(rank=lambda: 1, size=lambda: 2)


class Model(MimoModel):
    """Notes what Bridge's step hands it, as one module of a MIMO model."""

    def __init__(self, language: bool) -> None:
        torch.nn.Module.__init__(self)
        names = {} if language else {"images": None}
        self.role = SimpleNamespace(
            has_language_module=language, has_modality_modules=not language, modality_module_names=list(names),
            is_first_stage=lambda _: True, is_last_stage=lambda _: True,
        )  # fmt: skip
        self.mimo_config = SimpleNamespace(module_to_grid_map={"any": Grid()})
        self.batches: list[dict[str, Any]] = []

    def forward(self, **batch: Any) -> Any:
        inspect.signature(MimoModel.forward).bind(self, **batch)
        self.batches.append(batch)
        return torch.zeros(1, 256) if self.role.has_language_module else {"images": torch.zeros(1)}


def mimo_step(server: str, folder: Path, module: str) -> list[dict[str, Any]]:
    """What a module's model is handed in a microbatch or two."""
    provider = ServedMimoProvider(
        servers=server, job=one_pass(1), seq_length=256, modality="images", encoder="vit", image_token=290
    )
    groups = SimpleNamespace(dp=dist.group.WORLD, pp=dist.group.WORLD)
    infra = MegatronMIMOInfra({}, {}, {module: groups}, [module])
    assert "train_state" in inspect.signature(provider.iterators).parameters, "Bridge looks for it when it resumes"
    cfg = SimpleNamespace(model=SimpleNamespace(), checkpoint=SimpleNamespace(load=None, save=str(folder / module)))
    iterator, others = provider.iterators(cfg, infra)
    assert others is None
    state, model = SimpleNamespace(timers=Timers(2, "minmax")), Model(module == MIMO_LANGUAGE_MODULE_KEY)
    step = prepare_forward_step_func(forward_step, state)
    for _ in range(3):
        step(iterator, model)
    assert state.timers("batch-generator").active_time() > 0, "it tells what ranks wait for data"
    provider.close()
    return model.batches


def check_end(server: str) -> None:
    """A job that is shorter than the training is named, not taken for an error of parallelism."""
    served = ServedMimoProvider(servers=server, job=whole_job(1, {"steps": 1}), seq_length=256, modality="images")
    groups = SimpleNamespace(dp=dist.group.WORLD, pp=dist.group.WORLD)
    cfg = SimpleNamespace(model=SimpleNamespace(), checkpoint=SimpleNamespace(load=None, save=None))
    iterator, _ = served.iterators(cfg, MegatronMIMOInfra({}, {}, {"images": groups}, ["images"]))
    state, model = SimpleNamespace(timers=Timers(0, "minmax")), Model(language=False)
    for _ in range(MICROBATCHES):
        forward_step(state, iterator, model)
    with pytest.raises(ValueError, match=r"ended behind its 1 steps.*set train_iters to at most 1"):
        forward_step(state, iterator, model)
    served.close()


def check_mimo(server: str, folder: Path) -> None:
    """Though Bridge's grids have two data-parallel ranks, no module's step takes a slice of a served batch."""
    for text, images in zip(*(mimo_step(server, folder, m) for m in (MIMO_LANGUAGE_MODULE_KEY, "images")), strict=True):
        assert text["modality_inputs"] is None
        assert text["input_ids"].shape == text["labels"].shape == (1, 256)
        inputs = images["modality_inputs"]["images"]["vit"]
        assert (text["input_ids"] == 290).sum() == inputs["x"].shape[1] // 4 > 0


def main(server: str, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_num_microbatches_calculator(0, None, MICROBATCHES, 1, 1)
    calm, resumed = (start(server, folder, step, seed=0) for step in (0, 1))
    assert resumed == calm[MICROBATCHES:]
    with pytest.raises(StateError, match="differs in seed"):
        start(server, folder, 1, seed=7)
    check_mimo(server, folder)
    check_end(server)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
