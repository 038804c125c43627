"""What was found, for people and for programs."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from trainclient.orchestrate.choice import Choice, ModuleChoice
from trainclient.orchestrate.solving import Scored, Solution

HEADINGS = ("layout", "GPUs", "modules: dp x tp x pp", "micro-\nbatch", "waves", "step s\nsolved", "step s\nsimulated",
            "spread\n%", "MFU %", "GB", "bubble\n%")  # fmt: skip


def degrees(module: ModuleChoice) -> str:
    """A module with its degrees, such as `backbone 8 x 4 x 2`; `r` stands behind what computes activations again."""
    shown = f"{module.option.network.name} {module.dp} x {module.option.tp} x {module.pp}"
    return shown + (" r" if module.option.recompute else "")


def sequences(choice: Choice) -> str:
    """Sequences of a microbatch, such as `3`, `8/3` or `1/4`."""
    return str(choice.microbatch / Fraction(choice.finer))


def rows(solution: Solution) -> list[list[str]]:
    """The table, the fastest first."""
    return [_row(solution, scored) for scored in solution.scored]


def _row(solution: Solution, scored: Scored) -> list[str]:
    choice, found = scored.choice, scored.simulated
    return [
        choice.layout + ("" if scored.not_run is None else " *"), str(choice.gpus),
        ", ".join(degrees(m) for m in choice.modules) + (f", {choice.chunks} chunks" if choice.chunks > 1 else ""),
        sequences(choice),
        waves(scored) + (f" in {choice.rounds} rounds" if choice.rounds > 1 else ""),
        f"{choice.step_ns / 1e9:.3f}", "-" if found is None else f"{found.mean_ns / 1e9:.3f}",
        "-" if found is None or len(found.times_ns) == 1 else f"{found.spread_percent:.1f}",
        f"{mfu(solution, scored):.1f}", f"{choice.memory_bytes / 1e9:.1f}", f"{100 * choice.bubble:.1f}",
    ]  # fmt: skip


def waves(scored: Scored) -> str:
    """Microbatches of each rank as they are planned, such as `17` or `16-18`; as solved where nothing is planned."""
    if scored.simulated is None:
        return str(scored.choice.waves)
    least, most = min(scored.simulated.waves), max(scored.simulated.waves)
    return str(least) if least == most else f"{least}-{most}"


def notes(solution: Solution) -> list[str]:
    """What the simulated columns of the table say, if something was simulated."""
    draws = {len(s.simulated.times_ns) for s in solution.scored if s.simulated is not None}
    if not draws:
        return []
    number = max(draws)
    several = (
        f"{number} steps of different samples{'' if len(draws) == 1 else ' of the fastest two, one of the others'}"
    )
    how = "one step" if number == 1 else f"{several}; spread: slowest less fastest of them"
    said = [f"microbatch: sequences of it as solved; waves and step simulated: as planned, over {how}"]
    if any(s.simulated is None and s.refusal is None for s in solution.scored):
        said.append("-: not planned, since its solved step is far longer than the fastest; --steps plans all")
    return said


def mfu(solution: Solution, scored: Scored) -> float:
    """Percent of what all devices of the cluster could compute in the step as it is best known."""
    return 100 * scored.choice.mfu(solution.problem) * scored.choice.step_ns / scored.best_known_ns


def reasons(solution: Solution) -> list[str]:
    """Why the best of each other layout is slower than the fastest of all."""
    best, seen, found = solution.scored[0], {solution.scored[0].choice.layout}, []
    for scored in solution.scored[1:]:
        if scored.choice.layout not in seen:
            seen.add(scored.choice.layout)
            ratio = scored.best_known_ns / best.best_known_ns
            found.append(
                f"{scored.choice.layout} takes {ratio:.2f} times as long: {reason(scored.choice, best.choice)}"
            )
    found += [
        f"{degrees(s.choice.modules[0])} of {s.choice.layout} has no simulated time: {s.refusal}"
        for s in solution.scored
        if s.refusal is not None
    ]
    return found + list(solution.refused.values())  # each names its layout


def reason(choice: Choice, best: Choice) -> str:
    """What makes a choice slower, by the solver's times.

    A step is (time that devices compute) / (devices x share of the time that they compute): so the ratio of two steps
    is the product of three; each is said where it is more than a few percent.
    """
    said = []
    if best.gpus > 1.03 * choice.gpus:
        said.append(f"it uses {choice.gpus} GPUs, not {best.gpus} ({best.gpus / choice.gpus:.2f} x)")
    work = choice.busy_ns / best.busy_ns
    if work > 1.03:
        said.append(f"its devices compute {work:.2f} x as long in all{_of_work(choice, best)}")
    idle = (1 - best.bubble) / (1 - choice.bubble)
    if idle > 1.03:
        said.append(
            f"its devices are idle for {100 * choice.bubble:.0f} %, not {100 * best.bubble:.0f} ({idle:.2f} x)"
            f"{_of_idle(choice)}"
        )
    return "; ".join(said) or "what planner and simulator find, not the solver's means"


def _of_work(choice: Choice, best: Choice) -> str:
    """Say why the devices of a choice compute longer."""
    pairs = [(m, b) for m in choice.modules for b in best.modules if m.option.network is b.option.network]
    again = [m.option.network.name for m, b in pairs if m.option.recompute and not b.option.recompute]
    narrow = [m.option.network.name for m, b in pairs if m.option.tp > b.option.tp]
    said = [f"activations of {' and '.join(again)} are computed again"] if again else []
    said += [f"shares of {' and '.join(narrow)} are narrower"] if narrow else []
    return f" ({', '.join(said)})" if said else ""


def _of_idle(choice: Choice) -> str:
    """What devices are idle for, the longest part first."""
    waits = {name: ns for name, ns in choice.parts.items() if name not in ("waves", "computing") and ns}
    said = [f"{name} {ns / choice.step_ns * 100:.0f} % of the step" for name, ns in
            sorted(waits.items(), key=lambda part: -part[1]) if ns > 0.02 * choice.step_ns]  # fmt: skip
    if choice.parts.get("waves", 0) > 0.3 * choice.step_ns:
        slowest = choice.bottleneck
        others = [f"{m.option.network.name} takes {100 * m.wave_ns / slowest.wave_ns:.0f} %"
                  for m in choice.modules if m is not slowest]  # fmt: skip
        said.append(f"{slowest.option.network.name} is waited for, of whose time {', '.join(others)}")
    return f": {', '.join(said)}" if said else ""


def as_json(solution: Solution) -> dict[str, Any]:
    """What was found, for programs."""
    ready, cluster = solution.ready, solution.problem.cluster
    return {
        "cluster": {
            "gpu": cluster.gpu, "gpus": cluster.gpus, "gpus_per_node": cluster.gpus_per_node,
            "memory_bytes": cluster.memory_bytes, "within_bytes_ns": cluster.within_bytes_ns,
            "between_bytes_ns": cluster.between_bytes_ns,
        },
        "model": {n.name: {"kind": n.kind, "parameters": n.parameters, "frozen": n.frozen}
                  for n in solution.problem.networks},
        "solving_s": solution.solving_s,
        "scoring_s": solution.scoring_s,
        "choices": [_choice_json(solution, scored) for scored in solution.scored],
        "reasons": reasons(solution),
        "refused": dict(solution.refused),
        "execution": None if ready is None else ready.block,
    }  # fmt: skip


def _choice_json(solution: Solution, scored: Scored) -> dict[str, Any]:
    choice = scored.choice
    return {
        "layout": choice.layout,
        "gpus": choice.gpus,
        "modules": {m.option.network.name: _module_json(m) for m in choice.modules},
        "microbatch": choice.microbatch,
        "microbatches_of_a_sequence": choice.finer,
        "chunks": choice.chunks,
        "waves": choice.waves,
        "rounds": choice.rounds,
        "sharding": choice.sharding,
        "step_ns": round(choice.step_ns),
        "simulated_ns": None if scored.simulated_ns is None else round(scored.simulated_ns),
        "simulated_steps_ns": [] if scored.simulated is None else [round(ns) for ns in scored.simulated.times_ns],
        "simulated_waves": [] if scored.simulated is None else list(scored.simulated.waves),
        "spread_percent": None if scored.simulated is None else scored.simulated.spread_percent,
        "refusal": scored.refusal,
        "parts_ns": _rounded(choice.parts),
        "mfu_percent": mfu(solution, scored),
        "bubble_percent": 100 * choice.bubble,
        "memory_bytes": round(choice.memory_bytes),
        "not_run_by_this_trainer": scored.not_run,
        "execution": scored.block,
    }


def _module_json(module: ModuleChoice) -> dict[str, Any]:
    return {
        "dp": module.dp, "tp": module.option.tp, "pp": module.pp, "gpus": module.gpus,
        "recompute": module.option.recompute, "wave_ns": round(module.wave_ns),
        "memory_bytes": round(module.stage_bytes), "state_bytes": round(module.state_bytes),
    }  # fmt: skip


def _rounded(values: Mapping[str, float]) -> dict[str, int]:
    return {name: round(value) for name, value in values.items()}


def advice(solution: Solution) -> Sequence[str]:
    """What to know before the block is used."""
    best, ready = solution.scored[0], solution.ready
    chosen = (ready or best).choice
    shared = [m.option.network.name for m in chosen.modules if m.dp > 1 and not m.option.network.frozen]
    if chosen.sharding != "none" and shared:
        shares = [f"memory counts on `sharding: {chosen.sharding}` of {' and '.join(shared)} (docs/training.md)"]
    else:
        shares = []
    if best is ready or best.not_run is None:
        return shares
    lines = [
        *shares,
        f"the fastest, {best.choice.layout}, can be planned and served, but not trained yet: {best.not_run}",
    ]
    if ready is None:
        return [*lines, "nor can the others; the block below is that of the fastest, for trainers that can"]
    ratio = ready.best_known_ns / best.best_known_ns
    return [*lines, f"the block below is that of the fastest that can be, which takes {ratio:.2f} times as long"]
