"""A sharded network in a world of one process; `tests/program/test_gradients.py` has several."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from trainclient.exchange.wait_times import Waits
from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.parameters import initialise
from trainclient.sharding.dtensors import like, local
from trainclient.sharding.fsdp import ShardedNetwork, store_precisely
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

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
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


def backbone(dtype: torch.dtype) -> BackboneStage:
    found = BackboneStage(BackboneConfig(2, 16, 32, 2, 2, 1e4, 11, 0))
    initialise(found, 5, "llm")
    return found.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("by_hand", [True, False])
def test_text_is_embedded_before_the_forward_to_which_its_gradients_belong(
    mesh: DeviceMesh, dtype: torch.dtype, by_hand: bool
) -> None:
    """Microbatches that overlap: the next begins before the last one's backward, as in a pipeline."""
    plain, network = backbone(dtype), backbone(dtype)
    store_precisely(network)
    sharded = ShardedNetwork(network, "llm", mesh, dtype, Waits(torch.device("cpu")), by_hand=by_hand)
    batches = [texts(number) for number in range(3)]
    for batch in batches:
        plain(batch).loss_sum.backward()
    if by_hand:
        sharded.gather()
        gradients = Gradients(dict(network.named_parameters()))
    losses: list[Tensor] = []
    for batch in batches:
        assert batch.token_ids is not None
        if not by_hand:
            sharded.gather_outermost()
        assert not isinstance(network.embed.weight, DTensor)
        with torch.no_grad():
            text = network.embed_text(batch.token_ids)
        again = network.embed.register_forward_hook(refuse)
        losses.append(network(batch, text=text).loss_sum)
        again.remove()
        if len(losses) == 2:
            losses.pop(0).backward()
    for loss in losses:
        loss.backward()
    found = gradients.of_step() if by_hand else {name: local(some(p.grad)) for name, p in sharded.shards.items()}
    for name, parameter in plain.named_parameters():
        tolerance = 1e-9 if dtype == torch.float64 else 0.05
        torch.testing.assert_close(found[name], some(parameter.grad).to(found[name]), rtol=tolerance, atol=tolerance)
        assert float(found[name].abs().sum()) > 0, name


def texts(seed: int) -> BackboneBatch:
    tokens, none = (
        torch.randint(11, (7,), generator=torch.Generator().manual_seed(seed)),
        torch.zeros(0, dtype=torch.int64),
    )
    return BackboneBatch(torch.tensor([0, 3, 7]), torch.tensor([0, 1, 2, 0, 1, 2, 3]), tokens, none, none, tokens)


def some(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def refuse(*_: object) -> None:
    raise AssertionError("text is embedded again")


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
