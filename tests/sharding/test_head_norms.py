"""Norms of heads where tensor-parallel ranks have some of the heads each: whole gradients on all of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from trainclient.models.backbone import BackboneBatch, BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.parameters import initialise
from trainclient.sharding.tensor_parallel import split

SIZES = BackboneConfig(
    layers=2, width=32, mlp_width=40, heads=4, groups=2, rotary_base=1e4, vocab_size=50, query_tokens=0,
    head_norms=True, offset_norms=True, post_norms=True,
)  # fmt: skip


def network() -> BackboneStage:
    """With noise in its norms, which all begin alike."""
    module = BackboneStage(SIZES).to(torch.float64)
    initialise(module, 1, "llm")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return module


def gradients(module: BackboneStage) -> dict[str, torch.Tensor]:
    """Of one batch, with the loss itself."""
    none, ids = torch.zeros(0, dtype=torch.int64), torch.arange(11) * 3 % 50
    batch = BackboneBatch(torch.tensor([0, 4, 11]), torch.arange(11), ids, none, none, ids.roll(-1))
    loss = module(batch).loss_sum
    assert loss is not None
    loss.backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters() if "norm" in name}
    return {"loss": loss.detach(), **{name: grad.detach().clone() for name, grad in found.items() if grad is not None}}


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    module = network()
    split(module, "llm", init_device_mesh("cpu", (2,)))
    torch.save(gradients(module), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.long
def test_gradients_of_head_norms_are_whole_on_all_ranks(tmp_path: Path) -> None:
    multiprocessing.spawn(rank_main, (str(tmp_path),), nprocs=2)
    expected = gradients(network())
    assert sum("query_norm" in name or "key_norm" in name for name in expected) == 4
    for rank in range(2):
        found: dict[str, Any] = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-9, msg=name)
