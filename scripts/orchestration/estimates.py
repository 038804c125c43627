"""How far planned and simulated steps are from solved ones, where images and texts have very different sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from trainclient.layouts.pipelined.degrees import pipelined
from trainclient.orchestrate.choice import Problem
from trainclient.orchestrate.cluster import cluster
from trainclient.orchestrate.job_execution import execution_block
from trainclient.orchestrate.networks import read_network
from trainclient.orchestrate.rescoring import simulate
from trainclient.orchestrate.sample_sizes import SampleSize
from trainclient.orchestrate.workload import Stream, workload

TILE: Final = 1024
"""Patches of a tile of 448 x 448 pixels."""


def tiles(counts: Mapping[int, int], text: int) -> tuple[SampleSize, ...]:
    """Samples of one image each, by its number of tiles."""
    return tuple(SampleSize(c, text, (TILE * n,)) for n, c in counts.items())


def requests(*sizes: tuple[int, int, int]) -> tuple[SampleSize, ...]:
    """Samples by count, tokens of text, and patches of an image; 0 for none."""
    return tuple(SampleSize(c, text, (patches,) if patches else ()) for c, text, patches in sizes)


@dataclass(frozen=True, slots=True)
class Case:
    """Samples for ViT-H and Llama 7B on A800."""

    sizes: tuple[SampleSize, ...]
    packed: bool
    gpus: int = 48
    batch: int = 192
    tile: int = 0
    """Patches of a tile, which attend to each other alone; 0 where images are whole."""

    def problem(self) -> Problem:
        """Return the problem that is solved."""
        encoder = read_network("encoder", "vit-h")
        if self.tile:
            encoder = replace(encoder, size=replace(encoder.size, window=self.tile, global_layers=0))
        backbone = replace(read_network("backbone", "llama3-7b"), input_gradient=True)
        stream = Stream(self.batch, 8192, packed=self.packed)
        return Problem((encoder, backbone), cluster("a800", self.gpus), workload(self.sizes, stream))


CASES: Final[Mapping[str, Case]] = {
    "tiles": Case(tiles({1: 4, 3: 4, 5: 4, 7: 4, 13: 2}, 100), packed=True, tile=TILE),
    "tiles, held out": Case(tiles({2: 8, 4: 4, 9: 1}, 400), packed=True, gpus=64, batch=128, tile=TILE),
    "requests": Case(requests((8, 60, 256), (8, 200, 1024), (4, 800, 1024), (4, 500, 576), (2, 1500, 2304),
                              (1, 4000, 4096), (2, 300, 0)), packed=False),
    "requests, held out": Case(requests((16, 120, 576), (4, 600, 2304), (1, 2500, 1024)), packed=False, gpus=32,
                               batch=128),
}  # fmt: skip
"""`whole_images.AHEAD` and `backbones.LARGEST` are fitted to choices of those that are not held out."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A choice as solved and as planned."""

    solved_ns: float
    planned_ns: float
    """The mean of all draws."""
    spread_percent: float

    @property
    def ratio(self) -> float:
        """Return the planned time over the solved one."""
        return self.planned_ns / self.solved_ns


def estimates(case: Case, draws: int) -> list[Estimate]:
    """The best pipelined choices, each planned and simulated for so many draws."""
    problem, found = case.problem(), []
    for choice in pipelined(problem):
        simulated = simulate(problem, choice, execution_block(problem, choice), range(draws))
        found.append(Estimate(choice.step_ns, simulated.mean_ns, simulated.spread_percent))
    return found
