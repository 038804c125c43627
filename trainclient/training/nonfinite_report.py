"""What all processes say of a step whose gradients are not finite."""

import json
from collections.abc import Sequence
from typing import Any

from dataserver.planning.job.fields import Stream
from dataserver.planning.plan.naming import short_name
from trainclient.exchange.gathering import broadcast_text, gather_texts
from trainclient.program.finite import MAX_NAMED
from trainclient.program.runner import ChunkRunner
from trainclient.topology.process_groups import Groups


def explain(
    step: int, runners: Sequence[ChunkRunner], not_finite: Sequence[str], stream: Stream, groups: Groups
) -> str:
    """Where a step stopped being finite, the same text on all processes, which all call it.

    Args:
        step: the step.
        runners: of this process.
        not_finite: modules whose summed gradients are not finite in this process's parameters.
        stream: of the job; names the datasets.
        groups: this process and the others.
    """
    found = gather_texts(json.dumps(_report(runners, not_finite, groups)), groups.control)
    text = _cause(step, [json.loads(report) for report in found], stream) if found else ""
    return broadcast_text(text, groups.control)


def _cause(step: int, reports: Sequence[dict[str, Any]], stream: Stream) -> str:
    """The cause, of what all processes report."""
    origins = [r for r in reports if "microbatch" in r]
    if not origins:
        where = ", ".join(dict.fromkeys(module for r in reports for module in r["not_finite"])) or "no module alone"
        return f"the gradients of step {step} are not finite, of {where}; all rows between modules were finite"
    # What is not finite spreads: backward to those that come before, and from there to later waves.
    first = min(origins, key=lambda r: (r["direction"] == "backward", r["microbatch"]))
    samples = ", ".join(short_name(stream, *sample) for sample in first["samples"]) or "none"
    where = f"{first['module']} on global rank {first['rank']} ({first['process']})"
    return (
        f"the gradients of step {step} are not finite: {where} made what is not finite of finite numbers in the "
        f"{first['direction']} of microbatch {first['microbatch']}, of the samples {samples}"
    )


def _report(runners: Sequence[ChunkRunner], not_finite: Sequence[str], groups: Groups) -> dict[str, Any]:
    report = {"rank": groups.rank, "process": str(groups.process)[:200], "not_finite": list(not_finite)[:MAX_NAMED]}
    origins = [(origin, runner) for runner in runners if (origin := runner.finite.origin()) is not None]
    if origins:
        first, runner = min(origins, key=lambda o: (o[0].direction == "backward", o[0].microbatch))
        report |= {"microbatch": first.microbatch, "direction": first.direction, "samples": first.samples}
        report["module"] = runner.site.module.name[:200]
    return report
