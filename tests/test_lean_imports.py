"""What is loaded before it is needed: a server that starts, a help text and a client wait for none of it."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving.harness import index
from shards import write_pairs

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch", "numba", "llvmlite", "scipy", "pyarrow", "pyarrow.parquet", "matplotlib", "prometheus_client",
    "http.server", "tokenizers", "tyro", "rich", "grpc", "numpy", "pydantic", "PIL", "cv2", "yaml",
    "opentelemetry",
)  # fmt: skip
"""What takes longest to load of all that any part of this imports; some belong to one part, some to none."""
SERVING = {"grpc", "numpy", "pydantic"}
STREAMING = {"grpc", "numpy", "pydantic"}


def loaded(code: str) -> set[str]:
    """The heavy modules that a program has loaded at its end."""
    line = f"{code}\nimport sys; print('loaded', *({set(HEAVY)!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("import dataserver.serving.server", SERVING),
        ("from dataserver.cli import main; assert main(['--help']) == 0", set()),
        ("import dataserver.cli.serve", SERVING | {"tyro"}),
        ("import trainclient.__main__", set()),
        ("import trainclient.cli", STREAMING | {"tyro", "rich"}),
        ("import trainclient.stream.reader, trainclient.stream.jobs", STREAMING),
        ("import trainclient.adapters.full_model", STREAMING),
        ("import dataserver.planning.planner", {"numpy", "pydantic"}),
        ("import dataserver.cli.plan", SERVING | {"tyro", "rich"}),
    ],
)
def test_importing_loads_what_is_needed_at_once(code: str, needed: set[str]) -> None:
    assert loaded(code) <= needed


def test_importing_a_server_builds_no_model_and_loads_nothing_for_later() -> None:
    """What validates a job is built with the first one, in one piece: a default that is made before costs as much."""
    loaded(
        """
import sys
import dataserver.serving.server
from pydantic import BaseModel
def below(kind):
    for model in kind.__subclasses__():
        yield model
        yield from below(model)
ours = [model for model in below(BaseModel) if model.__module__.startswith("dataserver.")]
built = [model.__name__ for model in ours if model.__pydantic_complete__]
assert len(ours) > 20 and not built, built
later = {"concurrent.futures.process", "multiprocessing", "difflib", "grpc_status",  # crc32c loads importlib.metadata
         "dataserver.planning.fitting", "dataserver.planning.simulation", "dataserver.planning.layouts.interface"}
assert not later & sys.modules.keys(), later & sys.modules.keys()
"""
    )


def test_serving_a_first_microbatch_loads_no_more_than_that(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "d", 8, 8))
    code = f"""
from pathlib import Path
from dataserver.jobs import Catalog, JobPlanner, fill_job
from dataserver.planning.job.identity import parse_job
from dataserver.planning.plan.views import view_plan
from dataserver.assembly import prepare_view, total_bytes, view_tensors
from dataserver.serving.config import load_config
from dataserver.serving.server import DataServer
import numpy as np
config = load_config(None, {{"datasets": {{"d": Path({str(folder)!r})}}, "listen": "127.0.0.1:0"}})
catalog = Catalog.open(config)
server = DataServer(config, catalog)
server.start()
job = parse_job(fill_job({{
    "stream": {{"datasets": [{{"name": "d"}}], "seq_len": 2048, "global_batch": 4}},
    "execution": {{"modules": [{{"name": "e", "kind": "encoder"}}, {{"name": "b", "kind": "backbone"}}],
                   "end": {{"steps": 1}}}},
}}, catalog))
datasets = catalog.find_datasets(job.stream)
plan = JobPlanner(job, datasets).plan(0)
view = view_plan(job.spec, plan, "e", 0, 0)
tensors = view_tensors(job.spec, plan, view)
prepared = prepare_view(job.spec, plan, view, datasets, tensors, np.empty(total_bytes(tensors), np.uint8))
for task in prepared.tasks:
    task()
prepared.finish()
server.stop()
"""
    assert loaded(code) <= SERVING | {"cv2", "llvmlite", "numba", "PIL", "pyarrow", "scipy", "yaml"}
