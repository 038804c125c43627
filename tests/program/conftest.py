"""A server process with two sound datasets, and three in which one image of step 0 cannot be decoded."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.server_process import serving
from program.runtime_cases import SINGLE, Degrees, Pool, job_data
from serving.harness import index
from shards import break_pixels, write_interleaved, write_pairs, write_texts

from dataserver.assembly.tokens import ByteTokenizer, tokenizer_spec
from dataserver.dataset import Dataset
from dataserver.jobs import JobPlanner
from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.stream.samples import ROW_BITS, Task


@dataclass(frozen=True)
class Fleet:
    """A server and what it serves."""

    address: str
    folders: dict[str, Path]
    victims: dict[str, int]
    """The sample with the broken image, by dataset."""

    def job(self, degrees: Degrees, **options: Any) -> Job:
        """A complete job."""
        return self.completed(job_data(degrees, **options))

    def completed(self, data: dict[str, Any]) -> Job:
        """A job with what servers fill in."""
        for dataset in data["stream"]["datasets"]:
            dataset["fingerprint"] = Dataset.open(self.folders[dataset["name"]]).fingerprint
        data["stream"]["tokenizer"] = tokenizer_spec(ByteTokenizer()).model_dump()
        return parse_job(data)

    def pair_of_jobs(self, degrees: Degrees, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """A job of one step, and the same stream in one process, unbalanced and unordered."""
        options = {"end": {"steps": 1}, **options}  # else the server would plan and decode the next ones, too
        ours, reference = self.job(degrees, **options), self.job(degrees.single, balanced=False, **options)
        assert ours.stream_id == reference.stream_id
        return ours.spec.model_dump(mode="json"), reference.spec.model_dump(mode="json")


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The server; of the documents with a broken image, the victim has several images."""
    root = tmp_path_factory.mktemp("runtime")
    pairs = index(write_pairs(root / "pairs", 120, 40, seed=3, median_size=64, formats=("PNG",)))
    more = index(write_pairs(root / "more", 80, 40, seed=5, median_size=56, formats=("PNG",)))
    texts = index(write_texts(root / "texts", 96, 32, seed=6))
    docs = index(write_interleaved(root / "docs", 48, 16, seed=4, median_size=48))
    folders, victims = {"pairs": pairs, "docs": docs, "more": more, "texts": texts}, {}
    sources = {"understanding": pairs, "generation": pairs, "documents": docs}
    for name, folder in sources.items():
        folders[name] = root / name
        victims[name] = _break_one_image(folder, folders[name], name)
    arguments = [part for name, folder in folders.items() for part in ("--dataset", f"{name}={folder}")]
    with serving(*arguments) as server:
        yield Fleet(server.address, folders, victims)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Processes for all cases that need process groups."""
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


def _break_one_image(folder: Path, copy: Path, name: str) -> int:
    """Copy a dataset so that one sample of step 0 has an image that cannot be decoded; returns the sample."""
    dataset = Dataset.open(folder)
    samples = JobPlanner(Fleet("", {name: folder}, {}).job(SINGLE, dataset=name), (dataset,)).plan(0).samples
    task = Task.GENERATION if name == "generation" else Task.UNDERSTANDING
    several = np.diff(samples.image_offsets) > (1 if name == "documents" else 0)
    victim = int(samples.sample[(samples.task == task) & several][0])
    shard, row = divmod(victim, 1 << ROW_BITS)
    image = dataset.shards[shard].image(row, 0)
    copy.mkdir()
    for path in folder.iterdir():
        if path.suffix in (".tar", ".parquet"):
            shutil.copy(path, copy)
    tar = copy / dataset.shards[shard].name
    data = bytearray(tar.read_bytes())
    break_pixels(memoryview(data)[image.offset : image.offset + image.length])
    tar.write_bytes(data)
    index(copy)
    return victim
