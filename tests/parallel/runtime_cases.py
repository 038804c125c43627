"""Jobs and processes for the tests of the disaggregated runtime.

`python runtime_cases.py` is one process of a pool. For each line on its stdin it joins the others through torchrun's
environment variables, runs one step of every case, saves the gradients of its module, and prints a line.
"""

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from builders.jobs import compose, module

from dataserver.planning.identity import Job, parse_job
from trainclient.client import Batch, DataClient
from trainclient.models.parameters import fill_missing_gradients
from trainclient.parallel.assembly import build_executor, build_role
from trainclient.parallel.gradients import reduce_gradients
from trainclient.parallel.groups import process_groups
from trainclient.parallel.roles import LossWeights
from trainclient.parallel.topology import Topology
from trainclient.training.config import TrainConfig
from trainclient.training.modules import ModelConfigs, build_module

REPOSITORY = Path(__file__).resolve().parents[2]
WORKERS_TIMEOUT_S = 200
CLOSE_TIMEOUT_S = 20
DONE = "done\n"


@dataclass(frozen=True)
class Degrees:
    """Data-parallel degrees of the modules, and stages of the backbone; 0 leaves a module out."""

    encoder: int = 1
    backbone: int = 2
    stages: int = 2
    generator: int = 1

    @property
    def world_size(self) -> int:
        return self.encoder + self.backbone * self.stages + self.generator

    def __str__(self) -> str:
        return f"encoder {self.encoder}, backbone {self.backbone} x {self.stages}, generator {self.generator}"


SINGLE = Degrees(1, 1, 1, 1)


def job_data(
    degrees: Degrees, *, dataset: str = "pairs", balanced: bool = True, extra_in_flight: int = 0, **stream: Any
) -> dict[str, Any]:
    """A small job; what it leaves out is for the servers to fill in."""
    balance = "lpt" if balanced else "none"
    modules = [
        module("encoder", dp=degrees.encoder, balance=balance),
        module("backbone", dp=degrees.backbone, pp=degrees.stages, balance=balance),
        module("generator", dp=degrees.generator, balance=balance),
    ]
    order = "search" if balanced else "none"
    fields = {
        "datasets": [{"name": dataset}],
        "sizing": {"patch": 8, "merge": 2, "max_patches": 64},
        "seq_len": 192,
        "global_batch": 8,
        "generation": {"ratio": "0.5", "query_tokens": 4},
        "seed": 7,
        "layout": {"kind": "pipelined", "order": order, "extra_in_flight": extra_in_flight},
        "end": {"steps": 6},
    }
    return compose([m for m in modules if m["dp"]], **{**fields, **stream})


@dataclass(frozen=True)
class Case:
    """One run of step 0."""

    name: str
    servers: str
    job: dict[str, Any]
    dtype: str = "float64"
    text_weight: float = 1.0
    image_weight: float = 1.0
    other_plan_rank: int = -1
    """Global rank whose views claim to be of another plan."""

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(text_weight=self.text_weight, image_weight=self.image_weight, dtype=self.dtype)

    @property
    def parsed(self) -> Job:
        return parse_job(self.job)

    def batches(self, module: str, rank: int, tensors: Sequence[str] | None = None) -> Iterator[Batch]:
        """The views of one rank of step 0."""
        with DataClient(self.servers, self.parsed, module, rank, tensors=tensors) as client:
            for batch in client:
                yield batch
                if batch.last_of_step:
                    return


class Pool:
    """Processes that have imported torch once and run one layout's cases after the other's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def run(self, cases: Sequence[Case], folder: Path) -> dict[str, dict[str, torch.Tensor]]:
        """Run the cases, which share one layout; returns each case's gradients by their whole name."""
        for errors in self.outcomes(cases, folder):
            assert errors is None, errors
        results: dict[str, dict[str, torch.Tensor]] = {case.name: {} for case in cases}
        for case in cases:
            for path in sorted(folder.glob(f"{case.name}.*.pt")):
                results[case.name] |= torch.load(path)
        return results

    def outcomes(self, cases: Sequence[Case], folder: Path) -> list[str | None]:
        """What each process that failed, and so ended, wrote to stderr; None of those that ran the cases."""
        world = Topology.of(cases[0].parsed.spec).world_size
        script = folder / "cases.json"
        script.write_text(json.dumps([asdict(case) for case in cases]))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "CASES": str(script)}
        for rank in range(world):
            process = self._process(rank)
            print(json.dumps(shared | {"RANK": str(rank)}), file=process.stdin, flush=True)
        with ThreadPoolExecutor(world) as threads:
            try:
                return list(threads.map(self._outcome, range(world), timeout=WORKERS_TIMEOUT_S))
            except TimeoutError:
                self.close()
                raise

    def close(self) -> None:
        """End the processes: those that wait for cases by themselves, others by force."""
        for process in self._processes.values():
            try:
                process.communicate(timeout=CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        self._processes.clear()

    def _process(self, rank: int) -> subprocess.Popen[str]:
        """The process of a rank, started if there is none."""
        if rank not in self._processes:
            path = f"{REPOSITORY}:{REPOSITORY / 'protos'}:{REPOSITORY / 'tests'}"
            with self._errors(rank).open("w") as errors:
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, __file__],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        return self._processes[rank]

    def _outcome(self, rank: int) -> str | None:
        process = self._processes[rank]
        assert process.stdout is not None
        if process.stdout.readline() == DONE:
            return None
        process.communicate()
        del self._processes[rank]
        return self._errors(rank).read_text()

    def _errors(self, rank: int) -> Path:
        return self._folder / f"{rank}.stderr"


def run_cases() -> None:
    """One step of each of the cases that the environment names."""
    script = Path(os.environ["CASES"])
    cases = [Case(**data) for data in json.loads(script.read_text())]
    layout = Topology.of(cases[0].parsed.spec)
    layout.require_world_size(int(os.environ["WORLD_SIZE"]))
    with process_groups(layout, torch.device("cpu"), timeout_s=60) as groups:
        for case in cases:
            spec, place = case.parsed.spec, groups.place
            module = build_module(ModelConfigs.of(case.config, spec), place, case.config, groups.device)
            role = build_role(spec, layout, groups, module, LossWeights(case.text_weight, case.image_weight))
            batches = case.batches(place.module.name, place.rank, role.tensors)
            if groups.rank == case.other_plan_rank:
                batches = (replace(batch, plan_hash=bytes(32)) for batch in batches)
            assert build_executor(spec, layout, groups, role).run(batches) is not None
            fill_missing_gradients(module)
            reduce_gradients(module, groups.data_parallel, bucket_bytes=100_000)
            found = {f"{place.module.name}.{key}": p.grad for key, p in module.named_parameters()}
            torch.save(found, script.parent / f"{case.name}.{groups.rank}.pt")


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        os.environ.update(json.loads(line))
        run_cases()
        sys.stdout.write(DONE)
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # as the trainer does: an orderly exit may wait for the others
