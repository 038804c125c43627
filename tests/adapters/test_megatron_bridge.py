"""Megatron-Bridge's provider of data: where it begins, what it refuses; and in the real package."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from adapters.examples import example, variables
from adapters.stubs import Base, adapter_over, parallel_state
from adapters.whole_jobs import one_pass, text_job

from trainclient.stream.errors import ClosedError

RELEASES = {"megatron-core": "0.19.2", "megatron-bridge": "0.6.2"}


def group(rank: int, size: int) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def context(stage: int = 0, stages: int = 1, ranks: int = 1) -> SimpleNamespace:
    """Of a provider."""
    return SimpleNamespace(pg_collection=SimpleNamespace(pp=group(stage, stages), dp=group(0, ranks)))


def state(step: int, folder: Path) -> SimpleNamespace:
    """Bridge's, as its callbacks see it."""
    checkpoint = SimpleNamespace(load=str(folder), save=str(folder))
    cfg = SimpleNamespace(checkpoint=checkpoint, model=SimpleNamespace(seq_length=256))
    return SimpleNamespace(train_state=SimpleNamespace(step=step), cfg=cfg)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Over the names that it takes from Megatron-Bridge and megatron-core."""
    contents = {
        "megatron.core": {"parallel_state": parallel_state()},
        "megatron.core.packed_seq_params": {"PackedSeqParams": SimpleNamespace},
        "megatron.core.num_microbatches_calculator": {"get_num_microbatches": lambda: 10},
        "megatron.bridge.data.base": {"DatasetProvider": Base, "DatasetBuildContext": SimpleNamespace},
        "megatron.bridge.training.callbacks": {"Callback": Base},
    }
    adapter_over(monkeypatch, "megatron", RELEASES, contents)
    return adapter_over(monkeypatch, "megatron_bridge", RELEASES, contents)


def provider(adapter: ModuleType, server: str, job: dict[str, Any]) -> Any:
    return adapter.ServedProvider(servers=server, job=job, modality="images", encoder="vit", image_token=290)


def test_runs_begin_behind_the_updates_of_their_checkpoint(server: str, adapter: ModuleType, tmp_path: Path) -> None:
    found = []
    for step in (0, 1):
        served = provider(adapter, server, one_pass(1))
        begins = served.begins()
        begins.on_data_init_start(SimpleNamespace(state=state(step, tmp_path)))
        iterator, *others = served.build_datasets(context())
        assert others == [None, None]
        found.append([next(iterator)["input_ids"].tolist() for _ in range(11 - 10 * step)])
        begins.on_train_end(SimpleNamespace())
        with pytest.raises(ClosedError):
            next(iterator)
        assert served.build_datasets(context(stage=1, stages=3))[0] is None, "between the first stage and the last"
    assert found[0][10] == found[1][0]


def test_a_provider_that_does_not_know_where_to_begin(server: str, adapter: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"callbacks=\[cfg\.dataset\.begins\(\)\]"):
        provider(adapter, server, one_pass(1)).build_datasets(context())


def test_means_of_unequal_microbatches(server: str, adapter: ModuleType, tmp_path: Path) -> None:
    served, told = provider(adapter, server, one_pass(1)), state(0, tmp_path)
    told.cfg.model.calculate_per_token_loss = False
    served.begins().on_data_init_start(SimpleNamespace(state=told))
    with pytest.raises(ValueError, match=r"calculate_per_token_loss is False.*the mean of each microbatch"):
        served.build_datasets(context())


def test_another_number_of_ranks(server: str, adapter: ModuleType, tmp_path: Path) -> None:
    served = provider(adapter, server, one_pass(1))
    served.begins().on_data_init_start(SimpleNamespace(state=state(0, tmp_path)))
    with pytest.raises(ValueError, match="rank 0 of 2, and module llm has dp 1"):
        served.build_datasets(context(ranks=2))


def test_the_example_of_the_page(server: str, adapter: ModuleType, tmp_path: Path) -> None:
    """Bridge's `pretrain` wants GPUs; the one here does what it does with callbacks and data."""
    read = []

    def pretrain(cfg: Any, _forward_step: object, callbacks: list[Any]) -> None:
        (begins,) = callbacks
        begins.on_data_init_start(SimpleNamespace(state=state(0, tmp_path)))
        read.append(next(cfg.dataset.build_datasets(context())[0]))
        begins.on_train_end(SimpleNamespace())

    job = tmp_path / "job.json"
    job.write_text(json.dumps(text_job()))
    code = example("ServedProvider(").replace("data-0:50051", server).replace("job.yaml", str(job))
    names = {"ServedProvider": adapter.ServedProvider, "pretrain": pretrain, "forward_step": None}
    exec(code, {"cfg": SimpleNamespace(), **names})
    assert read[0]["tokens"].shape == (1, 256)


@pytest.mark.long
def test_bridge_builds_and_reads_its_iterators(server: str, tmp_path: Path, python_with: Callable[[str], Path]) -> None:
    """By its own functions, which fire callbacks, build data sets and take batches apart."""
    script = Path(__file__).with_name("megatron_bridge_data.py")
    line = [python_with("megatron"), script, server, tmp_path]
    found = subprocess.run(line, env=variables(), capture_output=True, text=True, check=False, timeout=200)
    assert found.returncode == 0, found.stderr[-3000:]
