"""Jobs, datasets and views for the tests of the disaggregated runtime, and the worker processes that run them.

`python runtime_cases.py CASES.json` is one process: it joins the others through torchrun's environment variables, runs
step 0 of every case, and saves the gradients of its module.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataserver.dataset import Dataset
from dataserver.planning.identity import Job, parse_job
from dataserver.planning.views import view_plan
from dataserver.preprocessing.tokens import ByteTokenizer, tokenizer_spec
from dataserver.preprocessing.views import prepare_view, total_bytes, view_tensors
from dataserver.serving.jobs import JobPlanner
from trainclient.models.parameters import fill_missing_gradients
from trainclient.parallel.assembly import build_executor, build_role
from trainclient.parallel.batches import Batch
from trainclient.parallel.gradients import reduce_gradients
from trainclient.parallel.groups import process_groups
from trainclient.parallel.layout import Layout
from trainclient.parallel.roles import LossWeights
from trainclient.stream.microbatch import Items, Microbatch
from trainclient.training.config import TrainConfig
from trainclient.training.modules import ModelConfigs, build_module

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Degrees:
    """Data-parallel degrees of the modules and stages of the backbone; 0 leaves a module out."""

    encoder: int = 1
    backbone: int = 2
    stages: int = 2
    generator: int = 1

    @property
    def world_size(self) -> int:
        return self.encoder + self.backbone * self.stages + self.generator


SINGLE = Degrees(1, 1, 1, 1)


def make_job(fingerprint: str, degrees: Degrees, *, ratio: str = "0.5", balanced: bool = True, **stream: Any) -> Job:
    modules = [
        {"name": "vit", "kind": "encoder", "dp": degrees.encoder},
        {"name": "llm", "kind": "backbone", "dp": degrees.backbone, "pp": degrees.stages},
        {"name": "dit", "kind": "generator", "dp": degrees.generator},
    ]
    policies = {} if balanced else {"balance": "none", "order": "none"}
    return parse_job(
        {
            "stream": {
                "datasets": [{"name": "pairs", "fingerprint": fingerprint}],
                "tokenizer": tokenizer_spec(ByteTokenizer()).model_dump(),
                "sizing": {"patch": 8, "merge": 2, "max_patches": 64},
                "seq_len": 192,
                "global_batch": 8,
                "generation": {"ratio": ratio, "query_tokens": 4},
                "seed": 7,
                **stream,
            },
            "execution": {"modules": [m for m in modules if m["dp"]], "policies": policies, "end": {"steps": 6}},
        }
    )


class DirectViews:
    """Views of a job made in this process, without a server."""

    def __init__(self, job: Job, dataset: Path) -> None:
        self.job = job
        self.datasets = (Dataset.open(dataset),)
        self.planner = JobPlanner(job, self.datasets)

    def batches(self, module: str, rank: int, step: int, tensors: Sequence[str] = ()) -> Iterator[Batch]:
        plan = self.planner.plan(step)
        for microbatch in range(plan.num_microbatches):
            spec, view = self.job.spec, view_plan(self.job.spec, plan, module, rank, microbatch)
            table = view_tensors(spec, plan, view, tensors)
            buffer = np.zeros(total_bytes(table), np.uint8)
            prepared = prepare_view(spec, plan, view, self.datasets, ByteTokenizer(), tensors, buffer)
            for task in prepared.tasks:
                task()
            prepared.finish()
            samples = plan.samples
            is_backbone = module == "llm"
            of = view.items if is_backbone else samples.image_sample[view.items]
            yield Microbatch(
                job_id=plan.job_id,
                stream_id=plan.stream_id,
                plan_hash=plan.hash,
                content_version=1,
                step=step,
                microbatch=microbatch,
                num_microbatches=plan.num_microbatches,
                text_tokens=plan.text_tokens,
                target_patches=plan.target_patches,
                items=Items(
                    samples.dataset[of].astype(np.int64),
                    samples.pass_[of],
                    samples.sample[of],
                    np.zeros(0, np.int64) if is_backbone else samples.image_number[view.items],
                    prepared.valid,
                ),
                sequence_valid=np.zeros(0, np.bool_),
                routings=view.routings,
                sequence_parallel_groups=(),
                tensors={t.name: torch.from_numpy(t.of(buffer).copy()) for t in table},
                bfloat16=frozenset(),
                nbytes=len(buffer),
                wait_s=0.0,
            )


@dataclass(frozen=True)
class Case:
    """One run of one step."""

    name: str
    dataset: str
    job: dict[str, Any]
    dtype: str = "float64"
    text_weight: float = 1.0
    image_weight: float = 1.0
    step: int = 0

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(text_weight=self.text_weight, image_weight=self.image_weight, dtype=self.dtype)


def case_of(name: str, job: Job, dataset: Path, **options: Any) -> Case:
    return Case(name, str(dataset), job.spec.model_dump(mode="json", exclude_none=True), **options)


def run_workers(cases: Sequence[Case], folder: Path, timeout_s: float = 100) -> dict[str, dict[str, torch.Tensor]]:
    """Run the cases, which share one layout, in real processes; returns each case's gradients by their whole name."""
    world = Layout.of(parse_job(cases[0].job).spec).world_size
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "cases.json"
    script.write_text(json.dumps([asdict(case) for case in cases]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'protos'}"}
    processes = [
        subprocess.Popen([sys.executable, __file__, str(script)], env={**shared, "RANK": str(rank)})
        for rank in range(world)
    ]
    try:
        codes = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    results: dict[str, dict[str, torch.Tensor]] = {case.name: {} for case in cases}
    for case in cases:
        for path in sorted(folder.glob(f"{case.name}.*.pt")):
            results[case.name] |= torch.load(path)
    return results


def main(script: Path) -> None:
    torch.set_num_threads(1)
    cases = [Case(**data) for data in json.loads(script.read_text())]
    layout = Layout.of(parse_job(cases[0].job).spec)
    layout.require_world_size(int(os.environ["WORLD_SIZE"]))
    with process_groups(layout, torch.device("cpu"), timeout_s=60) as groups:
        for case in cases:
            job, place = parse_job(case.job), groups.place
            module = build_module(ModelConfigs.of(case.config, job.spec), place, case.config, groups.device)
            weights = LossWeights(case.text_weight, case.image_weight)
            role = build_role(job.spec, layout, groups, module, weights)
            views = DirectViews(job, Path(case.dataset))
            batches = views.batches(place.module.name, place.rank, case.step, role.tensors)
            assert build_executor(layout, groups, role).run(batches) is not None
            fill_missing_gradients(module)
            reduce_gradients(module, groups.data_parallel)
            name = place.module.name
            found = {f"{name}.{key}": p.grad for key, p in module.named_parameters()}
            if role.loss_name:
                found[f"loss.{name}.{place.rank}"] = role.loss_sum
            torch.save(found, script.parent / f"{case.name}.{groups.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
