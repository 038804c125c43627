"""Rearrangement changes no loss and no gradient: a toy of two encoders and a backbone on CPU in float64."""

import numpy as np
import torch
from torch import Tensor, nn

from dataserver.planning.balancing import Places, compose
from dataserver.planning.colocated.arranging import arrange_phases
from dataserver.planning.colocated.phases import Link, Phase, PhasePlan
from dataserver.planning.samples import I64

RANKS, WIDTH, SEQUENCES = 4, 6, 9
ENCODERS = ("vit", "whisper")


def make_step() -> tuple[list[Phase], list[Link]]:
    draw = np.random.default_rng(3)
    phases = [Phase("llm", draw.integers(1, 100, SEQUENCES), np.arange(SEQUENCES))]
    links = []
    for name, count in zip(ENCODERS, (20, 13), strict=True):
        sample, rows = np.sort(draw.integers(0, SEQUENCES, count)), draw.integers(1, 5, count)
        phases.append(Phase(name, rows**2, sample, padded=name == "whisper"))
        links.append(Link(name, "llm", np.arange(count), sample, rows, 8 * WIDTH))
    return phases, links


def make_modules() -> nn.ModuleDict:
    torch.manual_seed(5)
    modules = {name: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for name in ENCODERS}
    return nn.ModuleDict({**modules, "llm": nn.Linear(WIDTH, WIDTH)}).double()


def inputs(link: Link) -> list[Tensor]:
    """The rows of each item, the same wherever it goes."""
    maker = torch.Generator().manual_seed(len(link.rows))
    return [torch.randn(rows, WIDTH, generator=maker, dtype=torch.float64) for rows in link.rows.tolist()]


def encode(module: nn.Module, link: Link, places: Places) -> list[Tensor]:
    """Each rank encodes its items in one batch."""
    items, found = inputs(link), []
    for r in range(RANKS):
        mine = np.flatnonzero(places.rank == r)
        mine = mine[np.argsort(places.position[mine])].tolist()
        found.append(module(torch.cat([torch.zeros(0, WIDTH, dtype=torch.float64), *(items[i] for i in mine)])))
    return found


def one_hop(buffers: list[Tensor], plan: PhasePlan, link: Link) -> list[Tensor]:
    """As the routing says, straight to the target's ranks."""
    routing = plan.routing(link.source, link.target).routing
    columns = (routing.source_rank, routing.source_start, routing.target_rank, routing.target_start, routing.rows)
    moved: list[list[tuple[int, Tensor]]] = [[] for _ in range(RANKS)]
    for a, start, b, begin, rows in zip(*(c.tolist() for c in columns), strict=True):
        moved[b].append((begin, buffers[a][start : start + rows]))
    return [joined([rows for _, rows in sorted(m, key=lambda at: at[0])]) for m in moved]


def two_hops(buffers: list[Tensor], plan: PhasePlan, link: Link) -> list[Tensor]:
    """Back to the layout of the samples, one item after the other, and from there to the target's ranks."""
    source, target = plan.arrangement(link.source).places, plan.arrangement(link.target).places
    here = np.arange(len(link.rows))
    sampling = Places(here, np.zeros(len(here), np.int64), here)
    lengths = [link.rows[source.rank == r][np.argsort(source.position[source.rank == r])] for r in range(RANKS)]
    items: list[Tensor] = [torch.empty(0)] * len(here)
    hop = compose(source, sampling)
    for a, position, item in zip(
        hop.source_rank.tolist(), hop.source_position.tolist(), hop.target_position.tolist(), strict=True
    ):
        items[item] = buffers[a].split(lengths[a].tolist())[position]
    found = []
    for r in range(RANKS):
        mine = np.flatnonzero(target.rank == r)
        mine = mine[np.argsort(target.position[mine])]
        found.append(joined([items[i] for s in mine.tolist() for i in np.flatnonzero(link.target_item == s).tolist()]))
    return found


def joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, WIDTH, dtype=torch.float64)


def sequence_loss(modules: nn.ModuleDict, rows: Tensor) -> Tensor:
    """Depends on which rows a sequence has, and on their order."""
    place = torch.arange(1, len(rows) + 1, dtype=torch.float64)[:, None]
    mixed = torch.tanh(modules["llm"](torch.cumsum(rows * torch.cos(place), 0)))
    return (mixed * place).square().sum()


def run(plan: PhasePlan, links: list[Link], hops) -> tuple[Tensor, list[Tensor]]:  # type: ignore[no-untyped-def]
    """Loss and gradients of a whole step, arranged as planned."""
    modules = make_modules()
    arrived = [hops(encode(modules[k.source], k, plan.arrangement(k.source).places), plan, k) for k in links]
    places, total = plan.arrangement("llm").places, torch.zeros((), dtype=torch.float64)
    for r in range(RANKS):
        mine = np.flatnonzero(places.rank == r)
        mine = mine[np.argsort(places.position[mine])]
        per_link = [b[r].split([rows_of(k, s) for s in mine.tolist()]) for b, k in zip(arrived, links, strict=True)]
        for parts in zip(*per_link, strict=True):
            total = total + sequence_loss(modules, torch.cat(parts))
    return finished(total, modules)


def finished(total: Tensor, modules: nn.ModuleDict) -> tuple[Tensor, list[Tensor]]:
    total.backward()
    return total.detach(), [p.grad for p in modules.parameters() if p.grad is not None]


def rows_of(link: Link, sequence: int) -> int:
    return int(link.rows[link.target_item == sequence].sum())


def test_one_hop_two_hops_and_no_arrangement_train_alike() -> None:
    phases, links = make_step()
    node: I64 = np.arange(RANKS) // 2
    plan = arrange_phases(phases, links, node)
    assert all((r.routing.source_rank != r.routing.target_rank).any() for r in plan.routings)
    loss, gradients = run(plan, links, one_hop)
    other_loss, other_gradients = run(plan, links, two_hops)
    assert torch.equal(loss, other_loss)
    assert len(gradients) == 6
    assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True))

    modules = make_modules()
    encoded = [[modules[k.source](x) for x in inputs(k)] for k in links]
    total = torch.zeros((), dtype=torch.float64)
    for s in range(SEQUENCES):
        rows = [e[i] for e, k in zip(encoded, links, strict=True) for i in np.flatnonzero(k.target_item == s)]
        total = total + sequence_loss(modules, joined(rows))
    whole, whole_gradients = finished(total, modules)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    for ours, theirs in zip(gradients, whole_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
