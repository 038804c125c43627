"""Modules that sleep: as long as the simulator says, forward and backward, in every place of a pipeline."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders.jobs import compose_whole, make_job, module
from builders.samples import make_samples
from sleeping_modules import WIDTH, sleeping_module

from dataserver.planning.costs.model import items_ns
from dataserver.planning.job.identity import parse_job
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


def test_encoders_of_clips_and_videos_sleep_what_their_views_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clips of 75 and 2 positions; two videos of 3 groups of 8 patches, and of one of 16."""
    slept: list[float] = []
    monkeypatch.setattr("sleeping_modules.time", SimpleNamespace(sleep=slept.append))
    media = [module("encoder", m, modality=m) for m in ("audio", "video")]
    job = parse_job(compose_whole([*media, module("backbone")], seq_len=512, global_batch=1))
    views = {
        "audio": {"cu_positions": [0, 75, 77], "cu_rows": [0, 37, 38]},
        "video": {"cu_patches": [0, 24, 40], "grid": [[3, 2, 4], [1, 4, 4]]},
    }
    sizes = {"audio": ([75, 2], None, 38), "video": ([24, 16], np.array([3, 1]), 10)}
    for name, tensors in views.items():
        encoder = sleeping_module(Site(job.spec, job.spec.execution.module(name), WIDTH, 0, 1), SCALE)
        arrays = {key: torch.tensor(value) for key, value in tensors.items()}
        assert {*encoder.tensors} == {*arrays}
        view = SimpleNamespace(tensors=arrays, items=SimpleNamespace(valid=np.ones(2, np.bool_)))
        output = encoder.forward(view, None)  # type: ignore[arg-type]
        expected, depths, rows = sizes[name]
        cost = job.spec.execution.module(name).cost
        planned = cost.microbatch_ns + items_ns(cost, np.array(expected), depths).sum()
        assert slept == pytest.approx([planned * SCALE / 1e9], rel=1e-12)
        assert len(output.rows.values) == rows
        slept.clear()
