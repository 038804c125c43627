"""Runs a job of the toy layout through all that asks layouts, and prints what the test looks at. Run by the test."""

import json
import sys
from collections import Counter
from typing import get_args

import numpy as np
from builders.jobs import compose_whole, module
from builders.samples import make_samples, make_table

import dataserver
from dataserver.planning.job.identity import identify, parse_job
from dataserver.planning.job.schema import job_schema
from dataserver.planning.job.spec import AnyLayout
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.plan.views import view_plan
from dataserver.planning.planner import ablation, explain, plan_step, timeline
from dataserver.planning.stream.samples import StepSamples
from dataserver.reporting.alternatives import alternatives_of
from dataserver.reporting.comparison import compare
from dataserver.serving.plan_message import plan_message


class OneStep:
    """What `compare` asks of a planner."""

    def __init__(self) -> None:
        self.job = parse_job(
            compose_whole(
                [module("backbone", dp=3, memory={"budget_bytes": 600, "unit_bytes": 1})],
                seq_len=600,
                global_batch=12,
                microbatch=2,
                layout={"kind": "toy"},
            )
        )

    def samples(self, step: int) -> StepSamples:
        return make_samples(self.job, 40, seed=step, max_images=0)


planner = OneStep()
job, samples = planner.job, planner.samples(4)
spec, layout = job.spec, layout_of(job.spec.execution)
plan = plan_step(job, 4, samples)
summary = explain(job, plan)
simulated = timeline(spec, plan)
held = Counter(
    item
    for rank in range(3)
    for microbatch in range(plan.num_microbatches)
    for item in view_plan(spec, plan, "llm", rank, microbatch).items.tolist()
)
limits = layout.limits(spec)
limits.add(0, make_table(job, np.random.default_rng(0), 9, 0), "a shard")
limits.check([1])
outcomes = compare(planner, alternatives_of(job), [0, 1], lambda *_: None)
definitions = job_schema()["$defs"]
sys.stdout.write(
    json.dumps(
        {
            "at": dataserver.__file__,
            "kinds": [get_args(o.model_fields["kind"].annotation)[0] for o in get_args(AnyLayout)],
            "same_id": identify(spec).job_id == job.job_id,
            "samples": len(samples),
            "each_once": held == Counter(range(len(samples))),
            "programs_simulated": [
                list(p.operations) == list(o)
                for p, o in zip(
                    layout.programs(spec.execution, plan.schedules, plan.num_microbatches),
                    simulated.pipeline.operations,
                    strict=True,
                )
            ],
            "makespan_ns": simulated.makespan_ns,
            "busiest_ns": int(simulated.timeline.busy_ns.max()),
            "bound_ns": summary.bound_ns,
            "other_baseline": summary.baseline.hash != plan.hash,
            "ablation": [[s.name, s.makespan_ns] for s in ablation(job, plan)],
            "message_hash": plan_message(job, plan, summary).plan_hash.hex() == plan.hash.hex(),
            "rows": [[o.alternative.heading, o.alternative.name, o.figures.of_layout] for o in outcomes],
            "in_schema": "ToyOptions" in definitions,
            "mapping": sorted(definitions["Execution"]["properties"]["layout"]["discriminator"]["mapping"]),
        }
    )
)
