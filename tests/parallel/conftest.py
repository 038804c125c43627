"""A server process with a sound dataset and two in which one image of step 0 cannot be decoded."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli.server_process import serving
from parallel.runtime_cases import SINGLE, Degrees, job_data
from serving.harness import index
from shards import write_pairs

from dataserver.dataset import Dataset
from dataserver.planning.identity import Job, parse_job
from dataserver.planning.samples import ROW_BITS, Task
from dataserver.preprocessing.tokens import ByteTokenizer, tokenizer_spec
from dataserver.serving.jobs import JobPlanner


@dataclass(frozen=True)
class Fleet:
    """A server and what it serves."""

    address: str
    folders: dict[str, Path]
    victims: dict[str, int]
    """The sample with the broken image, by dataset."""

    def job(self, degrees: Degrees, **options: Any) -> Job:
        """A complete job."""
        data = job_data(degrees, **options)
        dataset = data["stream"]["datasets"][0]
        dataset["fingerprint"] = Dataset.open(self.folders[dataset["name"]]).fingerprint
        data["stream"]["tokenizer"] = tokenizer_spec(ByteTokenizer()).model_dump()
        return parse_job(data)

    def pair_of_jobs(self, degrees: Degrees, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A job, and the same stream in one process, unbalanced and unordered."""
        ours, reference = self.job(degrees, **options), self.job(SINGLE, balanced=False, **options)
        assert ours.stream_id == reference.stream_id
        return ours.spec.model_dump(mode="json"), reference.spec.model_dump(mode="json")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """PNG, because a flipped byte in the pixels of a JPEG is often not noticed."""
    root = tmp_path_factory.mktemp("runtime")
    sound = index(write_pairs(root / "pairs", 120, 40, seed=3, median_size=64, formats=("PNG",)))
    folders, victims = {"pairs": sound}, {}
    for task in Task:
        name = task.name.lower()
        folders[name] = root / name
        victims[name] = _break_one_image(Fleet("", {name: sound}, {}), sound, folders[name], task)
    arguments = [part for name, folder in folders.items() for part in ("--dataset", f"{name}={folder}")]
    with serving(*arguments) as server:
        yield Fleet(server.address, folders, victims)


def _break_one_image(fleet: Fleet, folder: Path, copy: Path, task: Task) -> int:
    """Copy a dataset so that the first sample of step 0 with that task has a broken image; returns the sample."""
    dataset = Dataset.open(folder)
    samples = JobPlanner(fleet.job(SINGLE, dataset=task.name.lower()), (dataset,)).plan(0).samples
    victim = int(samples.sample[samples.task == task][0])
    shard, row = divmod(victim, 1 << ROW_BITS)
    image = dataset.shards[shard].image(row, 0)
    copy.mkdir()
    for path in folder.iterdir():
        if path.suffix in (".tar", ".parquet"):
            shutil.copy(path, copy)
    tar = copy / dataset.shards[shard].name
    data = bytearray(tar.read_bytes())
    middle, end = image.offset + image.length // 2, image.offset + image.length
    data[middle:end] = bytes(255 - byte for byte in data[middle:end])
    tar.write_bytes(data)
    index(copy)
    return victim
