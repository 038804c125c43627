"""Datasets, jobs and undisturbed runs that clients of other languages are held against."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.streams import dataset_flags, start_servers
from foreign import node
from serving.harness import index, job_data
from shards import write_interleaved, write_pairs


@pytest.fixture(scope="session")
def javascript() -> None:
    """Skip where JavaScript cannot run."""
    node.require_node()


@dataclass(frozen=True)
class Case:
    """A job over datasets, and what a client reads of it from one server that nothing happens to."""

    datasets: dict[str, Path]
    job: Path
    undisturbed: node.Read

    @property
    def flags(self) -> list[str]:
        """Of `dataserver serve`."""
        return dataset_flags(self.datasets)

    def complete(self, folder: Path) -> Path:
        """A file with the complete job."""
        path = folder / "complete.json"
        path.write_text(self.undisturbed.job["spec"])
        return path


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory, javascript: None) -> Case:
    """Twelve steps of pairs and documents for three modules, far more than what sockets and pipes hold."""
    root = tmp_path_factory.mktemp("foreign")
    datasets = {
        "pairs": index(write_pairs(root / "pairs", 60, 20, seed=1, median_size=200)),
        "docs": index(write_interleaved(root / "docs", 24, 8, seed=2, median_size=200)),
    }
    data: dict[str, Any] = job_data(seq_len=640, end={"steps": 12})
    job = root / "job.json"
    job.write_text(json.dumps(data))
    with ExitStack() as stack:
        return Case(datasets, job, node.read([*start_servers(stack, dataset_flags(datasets), 1)], job))
