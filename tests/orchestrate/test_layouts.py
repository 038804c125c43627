"""Every layout's best is the best of its own space, fits, and is a job that planner and simulator take."""

import re
from dataclasses import replace
from math import ceil

import pytest
from orchestration.instances import paper_problem

from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.grouped.compositions import check_compositions
from trainclient.layouts.colocated.degrees import colocated
from trainclient.layouts.contrastive.degrees import contrastive, equal_towers
from trainclient.layouts.grouped.degrees import exchange_ps, grouped, smallest_degree
from trainclient.layouts.pipelined.degrees import pipelined
from trainclient.orchestrate.choice import Choice, NoLayoutError, Problem, Solver, TooLargeError
from trainclient.orchestrate.cluster import cluster
from trainclient.orchestrate.costs import shard_bytes
from trainclient.orchestrate.job_execution import execution_block
from trainclient.orchestrate.networks import read_network
from trainclient.orchestrate.report import reason
from trainclient.orchestrate.rescoring import simulate
from trainclient.orchestrate.sample_sizes import SampleSize
from trainclient.orchestrate.shortfall import shortfall
from trainclient.orchestrate.solving import solve, solvers
from trainclient.orchestrate.workload import Stream, workload


def towers(gpus: int = 24, batch: int = 1024, memory_gb: float | None = None) -> Problem:
    networks = (read_network("tower", "vit-h", "image", "image"), read_network("tower", "clip-text-h", "text", "text"))
    sizes = [SampleSize(1, 60, (256,)), SampleSize(1, 30, (1024,))]
    stream = Stream(batch, 77, packed=False, contrastive_batch=batch)
    return Problem(networks, cluster("h100", gpus, memory_gb=memory_gb), workload(sizes, stream))


SOLVERS = solvers(has_backbone=True)


@pytest.mark.parametrize("layout", SOLVERS)
def test_choices_are_planned_and_take_about_as_long_as_solved(layout: str) -> None:
    problem = paper_problem("llama3-7b", 32, 64, 512)
    for choice in SOLVERS[layout](problem)[:2]:
        block = execution_block(problem, choice)
        execution = Execution.model_validate(block)
        assert execution.layout.kind == choice.kind
        for placed, module in zip(choice.modules, execution.modules, strict=True):
            assert module.memory is not None
            assert module.memory.unit_bytes == ceil(placed.option.unit_bytes / placed.pp)
            taken = placed.state_bytes + placed.work_bytes + module.memory.budget_bytes
            assert taken <= problem.cluster.memory_bytes
        backbone, width = choice.module("backbone"), 4096
        speeds = {("encoder", "backbone"): "12.5", ("backbone", "generator"): "12.5"}
        if backbone.pp > 1:
            speeds["backbone", "backbone"] = "200" if backbone.option.tp * backbone.pp <= 8 else "12.5"
        moved = {(t["source"], t["target"]): (t["bytes_per_ns"], t["row_bytes"]) for t in block["transfers"]}
        assert moved == {pair: (speed, 2 * width) for pair, speed in speeds.items()}
        if layout == "colocated":
            assert block["layout"]["ranks_per_node"] == 8 // backbone.option.tp
            assert block["layout"]["row_bytes"] == 2 * width
        assert choice.gpus <= 32
        assert choice.memory_bytes <= problem.cluster.memory_bytes
        assert choice.step_ns == pytest.approx(sum(choice.parts.values()))
        assert 0 <= choice.bubble < 1
        assert simulate(problem, choice, block, range(1)).mean_ns == pytest.approx(choice.step_ns, rel=0.35)


def test_stages_within_a_node_have_its_bandwidth() -> None:
    problem = paper_problem("llama3-7b", 32, 64, 512)
    best = pipelined(problem)[0]
    for tp, pp, speed in ((1, 8, "200"), (2, 4, "200"), (1, 16, "12.5"), (2, 8, "12.5")):
        (option,) = (o for o in problem.options(problem.networks[1]) if (o.tp, o.recompute) == (tp, False))
        staged = replace(best.module("backbone"), option=option, pp=pp, dp=1)
        modules = tuple(staged if m is best.module("backbone") else m for m in best.modules)
        transfers = execution_block(problem, replace(best, modules=modules))["transfers"]
        assert [t["bytes_per_ns"] for t in transfers if t["source"] == t["target"]] == [speed]


def bytes_of_colocated(problem: Problem, choice: Choice) -> float:
    """States of all modules, what is kept of a round and 5 % more, an item beside it, and a block that is computed."""
    stream, held, work = problem.workload.stream, 0.0, 0.0
    for placed in choice.modules:
        option = placed.option
        largest = stream.seq_len if option.network.kind == "backbone" else option.load.largest
        rows = max(choice.microbatch * option.load.rows, largest)
        kept = 1.05 * stream.global_batch / placed.dp / choice.rounds * option.load.rows + largest
        held += option.unit_bytes * (rows if option.network.kind == "generator" else kept)
        held += shard_bytes(option, placed.dp, choice.sharding == "zero2")
        work = max(work, rows * option.work_bytes)
    return held + work


def test_a_step_that_memory_does_not_hold_goes_in_rounds() -> None:
    def problem(memory_gb: float) -> Problem:
        return replace(paper_problem("llama3-7b", 16, 64, 512), cluster=cluster("a800", 16, memory_gb=memory_gb))

    found = [colocated(problem(memory_gb))[0] for memory_gb in (72, 28)]
    assert [c.rounds > 1 for c in found] == [False, True]
    one, several = found
    assert several.waves % several.rounds == 0
    assert several.step_ns > one.step_ns
    for choice, gigabytes in ((one, 72), (several, 28)):
        assert choice.memory_bytes == pytest.approx(bytes_of_colocated(problem(gigabytes), choice))
    block = execution_block(problem(28), several)
    assert simulate(problem(28), several, block, range(1)).mean_ns == pytest.approx(several.step_ns, rel=0.1)
    with pytest.raises(TooLargeError):
        colocated(problem(10))


def test_groups_are_as_servers_plan_them() -> None:
    assert smallest_degree(64, 64) == 1
    assert smallest_degree(256, 16) == 2
    for ranks, largest in ((1024, 32), (100_000, 16), (4096, 64)):
        smallest = smallest_degree(ranks, largest)
        assert smallest is not None
        check_compositions(ranks, smallest, largest)
        with pytest.raises(ValueError, match=rf"compositions of groups .* use min_degree {smallest} or more"):
            check_compositions(ranks, smallest // 2, largest)
    problem = paper_problem("llama3-7b", 32, 64, 512)
    option = problem.options(problem.networks[1])[0]
    assert exchange_ps(problem, option, 1) == 0
    again = replace(option, recompute=True)
    assert exchange_ps(problem, again, 8) == 1.5 * exchange_ps(problem, option, 8), "another forward"
    assert exchange_ps(problem, option, 16) > exchange_ps(problem, option, 8) > exchange_ps(problem, option, 2) > 0
    frozen = replace(problem, networks=(replace(problem.networks[0], frozen=True), *problem.networks[1:]))
    assert grouped(frozen)[0].step_ns < grouped(problem)[0].step_ns
    with pytest.raises(NoLayoutError, match="at most 8192 sequences"):
        grouped(paper_problem("llama3-7b", 32, 8200, 512))


def test_long_sequences_need_groups() -> None:
    problem = paper_problem("llama3-7b", 64, 64, 512, seq_len=131_072)
    choice = grouped(problem)[0]
    assert choice.extras["max_degree"] > 1
    assert choice.extras["heads"] == 32, "so that servers refuse larger groups, whoever changes the block"
    smallest, largest = choice.extras["min_degree"], choice.extras["max_degree"]
    degrees = [entry["degree"] for entry in choice.extras["exchange"]]
    assert degrees == [2**p for p in range(1, 7) if smallest <= 2**p <= largest]


def test_towers_with_degrees_of_their_own_beat_equal_ones() -> None:
    problem = towers()
    best, equal = contrastive(problem)[0], equal_towers(problem)[0]
    assert best.step_ns < equal.step_ns
    image, text = best.modules
    assert image.gpus > text.gpus
    assert "idle" in reason(equal, best) or "compute" in reason(equal, best) or "GPUs" in reason(equal, best)
    block = execution_block(problem, best)
    assert simulate(problem, best, block, range(1)).mean_ns == pytest.approx(best.step_ns, rel=0.35)
    frozen = replace(problem, networks=(replace(problem.networks[0], frozen=True), problem.networks[1]))
    less = contrastive(frozen)[0]
    assert less.step_ns < best.step_ns
    assert execution_block(frozen, less)["modules"][0]["frozen"]
    assert simulate(frozen, less, execution_block(frozen, less), range(1)).mean_ns == pytest.approx(
        less.step_ns, rel=0.35
    )


def test_the_fastest_comes_first_and_the_ready_one_is_run() -> None:
    solution = solve(paper_problem("llama3-7b", 32, 64, 512), 2)
    times = [s.best_known_ns for s in solution.scored]
    assert times == sorted(times)
    assert {s.choice.layout for s in solution.scored} == set(SOLVERS)
    if solution.ready is not None:
        assert solution.ready.not_run is None
    assert not solution.refused


def fits(solver: Solver, problem: Problem, memory_bytes: int, gpus: int) -> bool:
    try:
        return bool(solver(replace(problem, cluster=replace(problem.cluster, memory_bytes=memory_bytes, gpus=gpus))))
    except TooLargeError:
        return False


@pytest.mark.parametrize(
    ("layout", "solver", "problem"),
    [
        *((layout, solver, paper_problem("llama3-13b", 4, 64, 512)) for layout, solver in SOLVERS.items()),
        *((layout, solver, towers(3, 96, memory_gb=8)) for layout, solver in solvers(has_backbone=False).items()),
        ("pipelined", pipelined, paper_problem("llama3-7b", 1, 64, 512)),
    ],
)
def test_what_a_layout_lacks_is_the_least_that_is_enough(layout: str, solver: Solver, problem: Problem) -> None:
    """Neither a tenth of a gigabyte less would do, nor any smaller cluster of whole nodes."""
    gpus, has = problem.cluster.gpus, problem.cluster.memory_bytes
    said = shortfall(problem, layout, solver)
    found = re.fullmatch(
        rf"{layout}: does not fit {gpus} \w+ with [\d.]+ GB for modules: "
        r"(?:each would need ([\d.]+) GB, ([\d.]+) more, or )?(\d+) of them would be needed, (\d+) more", said
    )  # fmt: skip
    assert found is not None, said
    if found[1] is None:
        assert gpus < len(problem.networks), "no memory makes up for devices"
    else:
        enough = round(10 * float(found[1])) * 10**8
        assert fits(solver, problem, enough, gpus)
        assert not fits(solver, problem, enough - 10**8, gpus)
        assert float(found[2]) == pytest.approx((enough - has) / 1e9, abs=0.05)
    fewest = int(found[3])
    clusters = [n for n in range(1, fewest + 1) if n <= 8 or n % 8 == 0]
    assert [n for n in clusters if fits(solver, problem, has, n)] == [fewest]
    assert int(found[4]) == fewest - gpus


def test_a_model_too_large_for_any_layout_says_so_of_each() -> None:
    with pytest.raises(
        NoLayoutError, match=r"^no layout fits\. pipelined: .* more\. colocated: .* freeze a module$"
    ) as said:
        solve(paper_problem("llama3-70b", 8, 64, 512))
    assert all(f"{layout}: does not fit 8 a800 with 72.0 GB" in str(said.value) for layout in SOLVERS)
    with pytest.raises(
        NoLayoutError, match="GPUs with the memory that it needs; or lower the contrastive batch, or freeze"
    ):
        solve(towers(memory_gb=2))
    never = shortfall(paper_problem("llama3-70b", 8, 64, 512, seq_len=8192), "none", nothing)
    assert never.endswith("for modules: neither more memory nor more of them would do")


def nothing(problem: Problem) -> list[Choice]:
    raise TooLargeError("none")
