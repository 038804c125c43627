"""A sharded network in a world of one process; `tests/program/test_gradients.py` has several."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainclient.exchange.waiting import Waits
from trainclient.sharding.fsdp import ShardedNetwork, store_precisely
from trainclient.sharding.parts import like, local
from trainclient.training.gradients import Gradients


class Network(nn.Module):
    """Blocks in a list and in a mapping, something outside of them, and a parameter that takes no part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 1)})
        self.idle = nn.Linear(4, 1)
        self.activations = nn.ModuleList([nn.GELU()])
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
        self.to(dtype)

    def forward(self, x: Tensor, embedded: Tensor | None = None) -> Tensor:
        x = self.embed(x) if embedded is None else embedded
        for layer in self.layers:
            x = self.activations[0](layer(x))
        found: Tensor = self.heads["one"](x)
        return found


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp",))
    dist.destroy_process_group()


def dealt(network: Network, mesh: DeviceMesh, *, by_hand: bool) -> ShardedNetwork:
    dtype = network.embed.weight.dtype
    store_precisely(network)
    return ShardedNetwork(network, "vit", mesh, dtype, Waits(torch.device("cpu")), by_hand=by_hand)


def data(dtype: torch.dtype) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(9)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_units_gather_themselves_and_sum_zeros_for_what_was_left_out(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    plain, network = Network(dtype), Network(dtype)
    sharded = dealt(network, mesh, by_hand=False)
    assert list(sharded.shards) == [name for name, _ in plain.named_parameters()]
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in plain.named_parameters()}
    for microbatch in (1, 2, 3):
        x = data(dtype) * microbatch
        plain.zero_grad()
        found, reference = network(x), plain(x)
        assert found.dtype == dtype
        assert torch.equal(found, reference)
        found.sum().backward()
        reference.sum().backward()
        for name, parameter in plain.named_parameters():
            expected[name] += 0 if parameter.grad is None else parameter.grad
    stored = torch.promote_types(dtype, torch.float32)
    for name, shard in sharded.shards.items():
        assert shard.dtype == stored
        assert shard.grad is not None, name
        torch.testing.assert_close(local(shard.grad), expected[name].to(stored), rtol=1e-6, atol=1e-6)
    assert float(local(sharded.shards["idle.weight"].grad).abs().sum()) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_gathered_by_hand_is_whole_current_and_in_the_networks_type(
    mesh: DeviceMesh, dtype: torch.dtype
) -> None:
    plain, network = Network(dtype), Network(dtype)
    sharded = dealt(network, mesh, by_hand=True)
    assert all(isinstance(p, DTensor) for p in network.parameters())
    for step in range(3):
        sharded.gather()
        for (name, ours), theirs in zip(network.named_parameters(), plain.parameters(), strict=True):
            assert not isinstance(ours, DTensor), name
            assert torch.equal(ours, theirs + step), name
            assert ours.dtype == dtype
        network(data(dtype)).sum().backward()
        assert all(shard.grad is None for shard in sharded.shards.values())
        assert dtype is torch.bfloat16 or network.embed.weight.grad is not None  # or moved where FSDP adds it up
        if step == 1:  # after the other one it stays gathered, as after an evaluation
            sharded.release()
            assert all(isinstance(p, DTensor) for p in network.parameters())
        for shard, theirs in zip(sharded.shards.values(), plain.parameters(), strict=True):
            with torch.no_grad():
                local(shard).copy_(theirs + (step + 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_gathered_by_hand_computes_outside_of_the_forward_too(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """As a backbone embeds text before rows are there."""
    plain, network = Network(dtype), Network(dtype)
    sharded = dealt(network, mesh, by_hand=True)
    sharded.gather()
    ours, theirs = (Gradients(dict(n.named_parameters())) for n in (network, plain))
    for microbatch in (1, 2, 3):
        x = data(dtype) * microbatch
        network(x, network.embed(x)).sum().backward()
        plain(x).sum().backward()
    expected = theirs.of_step()
    assert float(expected["embed.weight"].abs().sum()) > 0
    for name, gradient in ours.of_step().items():
        assert torch.equal(gradient, expected[name]), name


def test_what_belongs_to_a_share_is_dealt_like_it(mesh: DeviceMesh) -> None:
    shards = dealt(Network(torch.float32), mesh, by_hand=True).shards
    held = torch.arange(12.0).view(4, 3)
    found = like(shards["embed.weight"], held)
    assert (found.shape, found.placements, found.device_mesh.size()) == ((4, 3), shards["embed.weight"].placements, 1)
    assert local(found).data_ptr() == held.data_ptr()
    assert local(held) is held


@pytest.mark.parametrize("by_hand", [True, False])
def test_frozen_parameters_are_stored_as_they_are(mesh: DeviceMesh, by_hand: bool) -> None:
    """Nothing is added to them, so they need no second half."""
    plain, network = Network(torch.bfloat16), Network(torch.bfloat16)
    network.layers.requires_grad_(requires_grad=False)
    network.embed.bias.requires_grad_(requires_grad=False)  # beside others that are not
    sharded = dealt(network, mesh, by_hand=by_hand)
    frozen = {name for name, shard in sharded.shards.items() if shard.dtype == torch.bfloat16}
    assert frozen == {name for name, _ in plain.named_parameters() if name.startswith("layers.")} | {"embed.bias"}
    if by_hand:
        sharded.gather()
    found = network(data(torch.bfloat16))
    assert torch.equal(found, plain(data(torch.bfloat16)))
    found.sum().backward()
    assert all(shard.grad is None for name, shard in sharded.shards.items() if name in frozen)
