"""A choice as the `execution` of a job, which servers plan as it stands."""

from math import ceil
from typing import Any

from dataserver.planning.job.spec import Execution
from trainclient.orchestrate.choice import Choice, ModuleChoice, Problem
from trainclient.topology.support import TopologyError, require_supported

Data = dict[str, Any]


def execution_block(problem: Problem, choice: Choice) -> Data:
    """The execution of a job: modules with degrees, costs and memory, the layout, and what lies between."""
    layout = {"kind": choice.kind, **choice.extras}
    block: Data = {"modules": [_module(problem, m) for m in choice.modules], "layout": layout}
    if choice.microbatch > 1:
        block["microbatch"] = choice.microbatch
    transfers = _transfers(problem, choice)
    if transfers:
        block["transfers"] = transfers
    return {**block, "end": dict(choice.end)}


def not_run(block: Data) -> str | None:
    """Why the trainer does not run an execution yet; None if it does."""
    try:
        require_supported(Execution.model_validate(block))
    except TopologyError as error:
        return str(error)
    return None


def _module(problem: Problem, module: ModuleChoice) -> Data:
    option, network = module.option, module.option.network
    found: Data = {"name": network.name, "kind": network.kind, "dp": module.dp}
    for name, degree in (("tp", option.tp), ("pp", module.pp)):
        if degree > 1:
            found[name] = degree
    if network.modality is not None:
        found["modality"] = str(network.modality)
    for name, value in (("frozen", network.frozen), ("recompute", option.recompute)):
        if value:
            found[name] = True
    free = problem.cluster.memory_bytes - module.state_bytes - module.work_bytes
    unit = ceil(option.unit_bytes / module.pp)
    memory = {"budget_bytes": int(free if module.budget_bytes is None else module.budget_bytes), "unit_bytes": unit}
    if module.step_bytes is not None:
        memory["step_bytes"] = max(int(module.step_bytes), memory["budget_bytes"])
    cost = option.cost.model_dump()
    cost["microbatch_ns"] += round(module.waiting_ns * 100 / (100 + cost["backward_percent"]))
    return {**found, "cost": cost, "memory": memory}


def _transfers(problem: Problem, choice: Choice) -> list[Data]:
    """From module to module, and between stages of the backbone; none of towers, which send no rows to each other."""
    if problem.network("backbone") is None:
        return []
    cluster, backbone = problem.cluster, choice.module("backbone")
    row = 2 * backbone.option.network.size.width
    names = [m.option.network.name for m in choice.modules]
    own = names.index(backbone.option.network.name)
    pairs = [(name, names[own]) for name in names[:own]] + [(names[own], name) for name in names[own + 1 :]]
    bandwidths = [(*pair, cluster.between_bytes_ns) for pair in pairs]
    if backbone.pp > 1:
        bandwidths.append((names[own], names[own], cluster.bandwidth(backbone.option.tp * backbone.pp)))
    return [
        {"source": source, "target": target, "bytes_per_ns": f"{bandwidth:.3f}".rstrip("0").rstrip("."),
         "row_bytes": row}
        for source, target, bandwidth in bandwidths
    ]  # fmt: skip
