"""What older versions of torch lack, by taking the newer names away, or with stand-ins of their signatures."""

import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.launcher.api import LaunchConfig

from trainclient import torch_compat
from trainclient.exchange.wait_times import Waits
from trainclient.models.attention import Segments
from trainclient.sharding.dtensors import local
from trainclient.sharding.fsdp import ShardedNetwork
from trainclient.torch_compat import Stager, fitted_varlen, varlen_kernel
from trainclient.training.gradients import scatter_gradients

CPU = torch.device("cpu")


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gradients_are_scattered_under_the_old_name(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "reduce_scatter_single", raising=False)
    gradients = {"w": torch.arange(6.0).view(3, 2)}
    assert torch.equal(scatter_gradients(gradients, world)["w"], gradients["w"])


def test_launchers_that_cannot_be_told_how_long_to_wait_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"shutdown_timeout": 77} if hasattr(LaunchConfig, "shutdown_timeout") else {}
    assert torch_compat.shutdown_timeout(77) == known
    monkeypatch.setattr(torch_compat.dataclasses, "fields", lambda _: ())
    assert torch_compat.shutdown_timeout(77) == {}


@dataclass(frozen=True, eq=False)
class Rows:
    rows: Tensor
    note: str | None = None


class Network(nn.Module):
    """Dataclasses in and out, and a layer that only some passes take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.outside, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))

    def forward(self, given: Rows, layers: int) -> Rows:
        rows = given.rows
        for layer in list(self.layers)[:layers]:
            rows = layer(rows)
        return Rows(self.outside(rows))


@pytest.mark.parametrize("layers", [1, 2])
def test_shares_of_what_was_left_out_get_zeros(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """Also where passes overlap, for which parameters are gathered again: tensors in dataclasses are found."""
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)
    monkeypatch.delattr(_common_utils, "collect_grad_tensors", raising=False)
    plain, network = Network(), Network()
    mesh = DeviceMesh.from_group(world, "cpu", mesh_dim_names=("dp",))
    sharded = ShardedNetwork(network, "vit", mesh, torch.float32, Waits(CPU), by_hand=False)
    for model in (plain, network):
        given = Rows(torch.ones(3, 2, requires_grad=True))
        outputs = [model(given, layers).rows.square().sum() for _ in range(2)]
        for output in outputs:
            output.backward()
        assert given.rows.grad is not None
    for name, parameter in plain.named_parameters():
        found = sharded.shards[name].grad
        assert (found is None) == name.startswith("layers.1") * (layers == 1), name  # it was not gathered at all
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if found is not None:
            torch.testing.assert_close(local(found), expected)


def since_2_12(
    q: Any, k: Any, v: Any, cu: Any, cu_k: Any, m: int, m_k: int, *, window_size: Any, enable_gqa: bool
) -> Any:
    return (q, k, v, cu, cu_k, m, m_k), window_size, enable_gqa


def of_2_11(q: Any, k: Any, v: Any, cu: Any, cu_k: Any, m: int, m_k: int, *, window_size: Any = (-1, -1)) -> Any:
    return (q, k, v, cu, cu_k, m, m_k), window_size, None


def of_2_10(q: Any, k: Any, v: Any, cu: Any, cu_k: Any, m: int, m_k: int, is_causal: bool = False) -> Any:
    raise AssertionError("it cannot be told of windows")


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1)])
@pytest.mark.parametrize("function", [since_2_12, of_2_11])
def test_varlen_attn_is_told_what_it_takes(function: Callable[..., Any], window: tuple[int, int], groups: int) -> None:
    query, key = torch.zeros(3, 4, 8), torch.zeros(3, groups, 8)
    offsets = torch.tensor([0, 3])
    given, found, grouped = fitted_varlen(function)(query, key, key, offsets, offsets, 3, 3, window)
    assert [id(value) for value in given[:5]] == [id(value) for value in (query, key, key, offsets, offsets)]
    assert (given[5:], found) == ((3, 3), window)
    assert grouped is (None if function is of_2_11 else groups == 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("known", [False, True], ids=["torch 2.9", "torch 2.10"])
def test_without_windows_the_kernel_below_is_called(
    monkeypatch: pytest.MonkeyPatch, *, known: bool, causal: bool
) -> None:
    """On the meta device, which has its contract."""
    monkeypatch.setitem(
        sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=of_2_10) if known else None
    )
    query, key, value = (
        torch.empty(4, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2, 2)
    )
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    varlen_kernel.cache_clear()
    run = varlen_kernel()
    varlen_kernel.cache_clear()
    out = run(query, key, value, offsets, offsets, 3, 3, (-1, 0) if causal else (-1, -1))
    assert out.shape == query.shape
    out.backward(torch.empty_like(out))
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_copies_are_taken_again_by_stagers_that_close(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = DefaultStager.stage

    def closing(self: DefaultStager, *args: Any, **options: Any) -> Any:
        found = stage(self, *args, **options)
        self._state_dict_stager.close()
        return found

    monkeypatch.setattr(DefaultStager, "stage", closing)
    torch_compat._stagers_last.cache_clear()
    stager = Stager(StagingOptions(False, False, False, False))
    tensor = torch.zeros(3)
    for step in range(3):
        tensor.fill_(step)
        copies = stager.stage({"w": tensor})
        assert torch.equal(copies["w"], tensor)
        assert copies["w"] is not tensor
    torch_compat._stagers_last.cache_clear()


def test_the_compiler_guards_no_field_of_segments() -> None:
    """That of torch 2.11 looks into frozen dataclasses, and compiles a block anew for each number of segments."""
    assert not Segments.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_every_entry_says_when_it_goes_and_none_is_overdue() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (oldest,) = re.findall(r"torch>=2\.(\d+)", " ".join(project["optional-dependencies"]["train"]))
    entries = [o for o in vars(torch_compat).values() if getattr(o, "__module__", "") == torch_compat.__name__]
    told = [inspect.getdoc(entry) or "" for entry in entries if not entry.__name__.startswith("_")]
    assert len(told) >= 7
    for text in told:
        (goes,) = re.findall(r"Goes with torch 2\.(\d+)\.", text)
        assert int(goes) > int(oldest), text
