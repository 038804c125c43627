"""Compiled blocks: the gradients of those that are not, and nothing is compiled again for other numbers of rows."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.flash_stand_in import kernel
from models.microbatches import PATCH, VOCAB, WIDTH, backbone, encoder, generator_
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.distributed.device_mesh import DeviceMesh

from trainclient.models import attention, compiling
from trainclient.models.backbone import BackboneStage
from trainclient.models.backbone_block import BackboneConfig
from trainclient.models.compiling import compile_blocks, require_compiler
from trainclient.models.encoder import EncoderConfig, ImageEncoder
from trainclient.models.generator import GeneratorConfig, ImageGenerator
from trainclient.models.lora import LowRank, adapt
from trainclient.models.parameters import initialise
from trainclient.sharding.dtensors import local
from trainclient.sharding.tensor_parallel import split

CPU = torch.device("cpu")
WARM_UP: tuple[tuple[int, ...], ...] = ((5, 7), (9,))
LATER: tuple[tuple[int, ...], ...] = ((3,), (11, 2, 6), (4, 4, 4, 4, 4), (), (1,), (2, 8))
"""Segments of microbatches: tokens of samples, or columns of two rows of blocks of images."""


Run = Callable[[nn.Module, tuple[int, ...], torch.Generator], Tensor]
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Run]] = {
    "backbone": (lambda: BackboneStage(BackboneConfig(2, WIDTH, 48, 4, 2, 1e4, VOCAB, 0)), backbone),
    "backbone, recomputed": (
        lambda: BackboneStage(BackboneConfig(2, WIDTH, 48, 4, 2, 1e4, VOCAB, 0), checkpoint=True),
        backbone,
    ),
    "encoder": (lambda: ImageEncoder(EncoderConfig(2, WIDTH, 4, 48, PATCH, 2, WIDTH)), encoder),
    "generator": (lambda: ImageGenerator(GeneratorConfig(2, WIDTH, 4, 48, PATCH, 2, WIDTH)), generator_),
}


def adapted_backbone() -> nn.Module:
    network = BackboneStage(BackboneConfig(3, WIDTH, 48, 4, 2, 1e4, VOCAB, 0))
    adapt(network, LowRank(3, 6.0, ["query", "down"]))
    return network


SPLIT = {
    "backbone": NETWORKS["backbone"],
    "backbone, adapted": (adapted_backbone, backbone),
    "generator": NETWORKS["generator"],
}


@pytest.fixture(autouse=True)
def in_this_process() -> Iterator[None]:
    """Torch otherwise starts processes to compile in, which import it again."""
    with inductor.patch(compile_threads=1):
        yield


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What other tests have compiled does not count."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def gradients(network: nn.Module, run: Run, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    network.zero_grad()
    run(network, lengths, torch.Generator().manual_seed(7)).backward()
    return {name: local(p.grad).clone() for name, p in network.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        "backbone, recomputed",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("backbone", "encoder", "generator")),
    ],
)
def test_gradients_are_those_of_eager_blocks_and_nothing_is_compiled_again(name: str) -> None:
    make, run = NETWORKS[name]
    hold_against_eager(*pair(make), run)


@pytest.fixture
def peer() -> Iterator[DeviceMesh]:
    """The mesh of a process that is its only peer: what is split is made of the same tensors and collectives."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SPLIT)
def test_nor_are_blocks_of_tensor_parallel_peers(peer: DeviceMesh, name: str) -> None:
    make, run = SPLIT[name]
    networks = pair(make)
    for network in networks:
        split(network, "module", peer)
    hold_against_eager(*networks, run)


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A network with values, as it is and compiled."""
    plain, compiled = make(), make()
    for network in (plain, compiled):
        initialise(network, 3, "module")
    names = [key for key, _ in compiled.named_parameters()]
    compile_blocks(compiled, CPU, torch.float32)
    assert [key for key, _ in compiled.named_parameters()] == names
    return plain, compiled


def hold_against_eager(plain: nn.Module, compiled: nn.Module, run: Run) -> None:
    warm = 0
    for i, lengths in enumerate((*WARM_UP, *LATER)):
        expected, found = gradients(plain, run, lengths), gradients(compiled, run, lengths)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
        if i + 1 == len(WARM_UP):
            warm = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == warm > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "backbone, recomputed",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("backbone", "encoder", "generator")),
    ],
)
def test_with_the_flash_kernel_a_block_is_one_graph_for_any_segments(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels need a GPU, so one stands in; and the graph is run by torch instead of being made code of."""

    def flash(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        found: Tensor = kernel(query, key, value, *rest[:-1])
        return found

    monkeypatch.setattr(attention, "varlen_kernel", lambda: flash)
    traced = attention.traceable_attention.__wrapped__()
    monkeypatch.setattr(compiling, "traceable_attention", lambda: traced)
    monkeypatch.setattr(compiling, "flash_applies", lambda *given: given == (CPU, torch.float32, WIDTH // 4))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    make, run = NETWORKS[name]
    _, compiled = pair(make)
    for lengths in ((5, 7, 3, 2, 4, 6, 1, 9), (9,)):  # no number that is also a size of the network
        gradients(compiled, run, lengths)
    warm = counters["stats"]["unique_graphs"]
    assert warm <= 2  # one image is a shape of its own
    for lengths in LATER:
        gradients(compiled, run, lengths)
    assert counters["stats"]["unique_graphs"] == warm
    assert not counters["graph_break"]


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="compile needs a compiler, and there is no no-such-compiler on PATH; install"):
        require_compiler(torch.device("cpu"))
    if torch.version.cuda is None:
        with pytest.raises(ValueError, match="compile needs triton"):
            require_compiler(torch.device("cuda"))
