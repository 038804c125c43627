"""What a process says of an error that ends it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainclient.exchange.lost_ranks import RankLostError, translate_rank_errors, translate_torch_rank_errors
from trainclient.training.signals import StopSignals
from trainclient.training.worker import _explain

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.10 GiB of "
    "which 3.00 GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by "
    "PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True "
    "to avoid it."
)


def test_a_device_without_memory_is_named_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it runs out while others are waited for."""
    with pytest.raises(torch.OutOfMemoryError) as caught, translate_rank_errors("other ranks"):
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)
    with StopSignals(1.0) as stop:
        assert _explain(caught.value, "3", stop) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainclient rank 3: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has")
    assert "`trainclient memory`" in line
    assert "PYTORCH_ALLOC_CONF" not in line
    with StopSignals(1.0) as stop:
        assert _explain(torch.OutOfMemoryError(), "3", stop) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainclient rank 3: out of memory; have plans keep within the device")


@pytest.mark.parametrize("make", [torch.empty, np.empty, bytearray])
def test_a_machine_without_memory_is_named_too(make: Callable[[int], Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught, translate_rank_errors("other ranks"):
        make(10**17)
    with StopSignals(1.0) as stop:
        assert _explain(caught.value, "3", stop) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"trainclient rank 3: (DefaultCPUAllocator: can't allocate|Unable to allocate|out of memory)", line)
    assert "`trainclient memory`" in line


@pytest.mark.parametrize(("kind", "code"), [(RuntimeError, 1), (TypeError, 1), (ValueError, 2)])
def test_an_error_in_code_of_the_users_own_is_said_with_its_place(
    kind: type[Exception], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last line there, whatever library it came from; without a traceback."""
    with pytest.raises(kind) as caught:
        {
            RuntimeError: lambda: torch.ones(2, 3) @ torch.ones(2, 3),
            TypeError: lambda: torch.nn.Linear(in_channels=3),  # type: ignore[call-arg]
            ValueError: lambda: np.zeros(3).reshape(2, 2),
        }[kind]()
    with StopSignals(1.0) as stop:
        assert _explain(caught.value, "3", stop) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(rf"trainclient rank 3: {kind.__name__} in {__file__}:\d+: \S", line)


def test_what_torch_says_of_a_lost_process_in_its_own_collectives_is_known_by_its_text() -> None:
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5. This is why."
    for error in (RuntimeError(gloo), dist.DistBackendError("Connection closed by peer [::1]:5. NCCL says more.")):
        with (
            pytest.raises(RankLostError, match=r"ranks \(Connection closed by peer \[::1\]:5\)"),
            translate_torch_rank_errors(),
        ):
            raise error
    with pytest.raises(RuntimeError, match=r"^another$"), translate_torch_rank_errors():
        raise RuntimeError("another")
