"""What a step reports, and who a process is."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainclient.training.config import ConfigError, Device
from trainclient.training.metrics import sample_hash
from trainclient.training.peak_flops import known_peak, peak_flops
from trainclient.training.rank import Process, choose_device

SAMPLES = st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3), unique=True, max_size=20)


@given(samples=SAMPLES, data=st.data())
def test_digest_does_not_depend_on_order_or_split(samples: list[tuple[int, int, int]], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(samples))
    cut = data.draw(st.integers(0, len(samples)))
    parts = sample_hash(shuffled[:cut]) + sample_hash(shuffled[cut:])
    assert parts % 2**63 == sample_hash(samples)


@given(samples=SAMPLES.filter(bool))
def test_digest_tells_sets_apart(samples: list[tuple[int, int, int]]) -> None:
    assert sample_hash(samples) != sample_hash(samples[1:])
    assert sample_hash(samples) != sample_hash([*samples, samples[0]])


def test_digest_tells_parts_of_a_document_apart() -> None:
    found = {sample_hash([(1, 0, 7)]), *(sample_hash([(1, 0, 7, part)]) for part in range(3))}
    assert len(found) == 4


def test_process_from_environment() -> None:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    environment = {name: str(i) for i, name in enumerate(names)}
    assert Process.from_environment(environment) == Process(0, 1, 2, 3)
    for name in names:
        with pytest.raises(ConfigError, match=name):
            Process.from_environment({key: value for key, value in environment.items() if key != name})


def test_cpu_is_chosen_and_no_gpu_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert choose_device(Device.CPU, 3, waits_for_single_ranks=True).type == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_processes_of_pipelines_load_their_kernels_before_any_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, pipelined, after in ((None, False, None), (None, True, "EAGER"), ("LAZY", True, "LAZY")):
        monkeypatch.setattr(os, "environ", {} if before is None else {"CUDA_MODULE_LOADING": before})
        choose_device(Device.CPU, 0, waits_for_single_ranks=pipelined)
        assert os.environ.get("CUDA_MODULE_LOADING") == after


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peaks_of_devices(name: str, tflops: float | None) -> None:
    assert known_peak(name) == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert peak_flops(None, torch.device("cpu")) is None
    assert peak_flops(0.5, torch.device("cpu")) == 0.5e12
