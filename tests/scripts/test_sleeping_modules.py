"""Modules that sleep: as long as the simulator says, forward and backward, in every place of a pipeline."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders.jobs import make_job
from builders.samples import make_samples
from sleeping_modules import WIDTH, sleeping_module

from dataserver.planning.plan.expectation import item_sizes
from dataserver.planning.planner import plan_step, timeline
from trainclient.modules import Site

SCALE = 3


def test_a_module_sleeps_what_was_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node and microbatch of a plan: the sizes in its view lead to the simulator's times."""
    slept: list[float] = []
    monkeypatch.setattr("sleeping_modules.time", SimpleNamespace(sleep=slept.append))
    fields = {"stream": {"seq_len": 4096, "global_batch": 8, "generation": {"ratio": "0.5", "query_tokens": 4}}}
    job = make_job(encoder=2, backbone=(2, 2), generator=1, **fields)
    samples = make_samples(job, 40)
    plan = plan_step(job, 0, samples)
    simulated = timeline(job.spec, plan)
    for number, node in enumerate(simulated.nodes):
        module = job.spec.execution.module(node.modules[0])
        arrangement, sizes = plan.arrangement(module.name), item_sizes(module, samples)
        for microbatch in range(plan.num_microbatches):
            here = torch.from_numpy(sizes[arrangement.item[arrangement.of(node.rank, microbatch)]])
            site = Site(job.spec, module, WIDTH, node.stage, module.pp)
            output, _ = sleeping_module(site, SCALE).run(here, 2)  # type: ignore[attr-defined]
            torch.autograd.backward(output, torch.zeros_like(output))
            expected = [
                simulated.pipeline.forward_ns[number, microbatch],
                simulated.pipeline.backward_ns[number, microbatch],
            ]
            np.testing.assert_allclose(slept, np.array(expected) * SCALE / 1e9, rtol=1e-12)
            slept.clear()
