"""The client in JavaScript gets what the client in Python gets, with the default limits of its gRPC library."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli.server_process import ServerProcess, serving
from disttrain.v1.microbatch_pb2 import Validity
from e2e.streams import dataset_flags, read_views
from foreign import node
from foreign.conftest import Case
from jobs.written import readme_job
from serving.harness import index, job_data
from shards import write_pairs
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from dataserver.assembly import load_tokenizer
from dataserver.dataset import count_tokens
from dataserver.planning.job.identity import parse_job
from trainclient.client import Batch

pytestmark = pytest.mark.usefixtures("javascript")
DEFAULT_LIMIT = 4 << 20
"""Bytes of a message that gRPC takes in every language."""


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[ServerProcess]:
    with serving(*case.flags) as found:
        yield found


def as_node_says(batch: Batch) -> dict[str, Any]:
    """The fields of a microbatch that both clients hand out, in the form of the client in JavaScript."""
    items = batch.items
    return {
        "position": [str(batch.step), batch.microbatch, batch.num_microbatches],
        "plan_hash": batch.plan_hash.hex(),
        "denominators": [str(batch.text_tokens), str(batch.target_patches)],
        "items": [items.dataset.tolist(), items.epoch.tolist(), [str(s) for s in items.sample], items.image.tolist()],
        "validity": [Validity.Name(v) for v in items.validity],
        "sequence_valid": batch.sequence_valid.tolist(),
        "routings": [[r.source_module, r.target_module, r.rows.tolist()] for r in batch.routings],
        "sha256": {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in batch.tensors.items()},
    }


def as_python_says(line: node.Line) -> dict[str, Any]:
    """The same of a line."""
    header = line["header"]
    items, denominators = header["items"], header["denominators"]
    return {
        "position": [header["step"], header["microbatch"], header["num_microbatches"]],
        "plan_hash": header["plan_hash"],
        "denominators": [denominators["text_tokens"], denominators["target_patches"]],
        "items": [items["dataset"], items["epoch"], items["sample"], items["image"]],
        "validity": items["validity"],
        "sequence_valid": header["sequence_valid"],
        "routings": [[r["source_module"], r["target_module"], r["rows"]] for r in header["routings"]],
        "sha256": line["sha256"],
    }


def position(line: node.Line) -> tuple[int, int]:
    return int(line["header"]["step"]), line["header"]["microbatch"]


def codecs(read: node.Read) -> set[str]:
    return {tensor["codec"] for line in read.lines for tensor in line["header"]["tensors"]}


@pytest.mark.parametrize("codec", ["raw", pytest.param("zstd", marks=pytest.mark.long)])
def test_all_modules_and_ranks_get_what_python_gets(case: Case, server: ServerProcess, codec: str) -> None:
    read = node.read([server.address], case.job, "--codec", codec)
    assert codecs(read) == ({"CODEC_RAW"} if codec == "raw" else {"CODEC_RAW", "CODEC_ZSTD"})
    python = read_views([server.address], parse_job(json.loads(read.job["spec"])), as_node_says)
    assert sum(map(len, python.values())) == len(read.lines)
    for view, batches in python.items():
        assert [as_python_says(line) for line in read.view(*view)] == batches
    assert read.contents() == case.undisturbed.contents()


def test_a_stream_begins_anywhere(case: Case, server: ServerProcess) -> None:
    found = node.read(
        [server.address], case.job, "--module", "llm", "--rank", "1", "--step", "3", "--microbatch", "2", "--steps", "2"
    )
    assert position(found.lines[0]) == (3, 2)
    expected = [line for line in case.undisturbed.view("llm", 1) if (3, 2) <= position(line) < (5, 0)]
    assert [*map(node.content, found.lines)] == [*map(node.content, expected)]


def test_default_message_limits_suffice_for_large_microbatches(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "pairs", 16, 16, median_size=512))
    modules = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    sizes = {"seq_len": 4096, "global_batch": 8, "microbatch": 8, "sizing": {"max_patches": 1024}, "generation": {}}
    job = tmp_path / "job.json"
    data = job_data(datasets=[{"name": "pairs"}], modules=modules, end={"steps": 1}, **sizes)
    job.write_text(json.dumps(data))
    with serving(*dataset_flags({"pairs": folder})) as server:
        read = node.read([server.address], job, "--codec", "raw")
        python = read_views([server.address], parse_job(json.loads(read.job["spec"])), as_node_says)
    assert max(int(line["header"]["total_bytes"]) for line in read.lines) > DEFAULT_LIMIT
    assert {view: [*map(as_python_says, read.view(*view))] for view in python} == python


def test_the_readme_job_is_filled_in(tmp_path: Path) -> None:
    folder, file = index(write_pairs(tmp_path / "laion", 200, 50, median_size=400)), tmp_path / "tokenizer.json"
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel()
    model.train_from_iterator(["a photo of the old red boat"], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model.save(str(file))
    count_tokens(folder, load_tokenizer("llama", file))
    job = tmp_path / "job.json"
    job.write_text(json.dumps(readme_job()))
    with ExitStack() as stack:
        flags = [*dataset_flags({"laion": folder}), "--tokenizer", f"llama={file}"]
        server, other = (stack.enter_context(serving(*flags)) for _ in range(2))
        read = node.read([server.address], job)
        complete = tmp_path / "complete.json"
        complete.write_text(read.job["spec"])
        again = node.read([other.address], complete)
    block = json.loads(read.job["spec"])["stream"]["tokenizer"]
    assert [filled["path"] for filled in read.job["filled"]] == [
        "/stream/datasets/0/fingerprint",
        "/stream/datasets/0/quarantine",
        *(
            f"/stream/tokenizer/{name}"
            for name in ("digest", "vocab_size", "bos", "eos", "boi", "eoi", "image", "query")
        ),
    ]
    for filled in read.job["filled"]:
        name = filled["path"].rpartition("/")[2]
        if "tokenizer" in filled["path"]:
            assert json.loads(filled["value_json"]) == block[name]
    assert again.job["filled"] == []
    assert (again.job["job_id"], again.job["spec"]) == (read.job["job_id"], read.job["spec"])
    assert again.contents() == read.contents()
    views = {(line["module"], line["rank"]) for line in read.lines}
    assert views == {(m["name"], r) for m in readme_job()["execution"]["modules"] for r in range(m["dp"])}
