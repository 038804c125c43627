"""Megatron-Bridge's own functions over our provider, on a CPU: megatron_bridge_data.py SERVER FOLDER.

They fire callbacks, build data sets and iterators, and take batches apart for its step of GPT.
"""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist
import transformers  # noqa: F401  before what stands for packages that it looks for
from adapters import cuda_on_cpu, tiny_mimo  # noqa: F401
from adapters.whole_jobs import text_job

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
from megatron.bridge.training.callbacks import CallbackContext, CallbackManager  # noqa: E402
from megatron.bridge.training.gpt_step import get_batch_from_iterator  # noqa: E402
from megatron.bridge.training.state import TrainState  # noqa: E402
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator  # noqa: E402

from trainclient.adapters.megatron_bridge import ServedProvider  # noqa: E402
from trainclient.stream.errors import StateError  # noqa: E402

MICROBATCHES = 20


def start(server: str, folder: Path, step: int, seed: int) -> list[list[int]]:
    """The tokens of a run's first microbatches, as Bridge's step reads them."""
    provider = ServedProvider(servers=server, job=text_job(seed))
    cfg = SimpleNamespace(
        dataset=provider,
        model=SimpleNamespace(),
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


def main(server: str, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    init_num_microbatches_calculator(0, None, MICROBATCHES, 1, 1)
    calm, resumed = (start(server, folder, step, seed=0) for step in (0, 1))
    assert resumed == calm[MICROBATCHES:]
    with pytest.raises(StateError, match="differs in seed"):
        start(server, folder, 1, seed=7)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
