"""The client against `dataserver serve` processes."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.preforked import PreforkedProcess
from cli.server_process import command, dataserver, serving
from ports import free_addresses
from serving.harness import VIEWS, index, job_data, running
from shards import write_interleaved, write_pairs

from dataserver.dataset.dataset import Dataset
from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import parse_job
from dataserver.serving.config import load_config
from trainclient.client import Batch, DataClient
from trainclient.stream.endpoint import Timeouts
from trainclient.stream.errors import DataServiceError

Address = str
Digest = tuple[object, ...]


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("real")
    return {
        "pairs": index(write_pairs(root / "pairs", 40, 16, seed=1)),
        "docs": index(write_interleaved(root / "docs", 24, 8, seed=2)),
    }


@pytest.fixture(scope="module")
def address(datasets: dict[str, Path]) -> Iterator[Address]:
    """That of a server which no test ends."""
    flags = [f for name, path in datasets.items() for f in ("--dataset", f"{name}={path}")]
    with serving(*flags) as server:
        yield server.address


@pytest.fixture
def start(datasets: dict[str, Path]) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Address]]]:
    """Start server processes; none survives the test."""
    processes: list[subprocess.Popen[str]] = []

    def begin(seed: str = "") -> tuple[subprocess.Popen[str], Address]:
        flags = [f for name, path in datasets.items() for f in ("--dataset", f"{name}={path}")]
        words = ["serve", "--listen", *free_addresses(1), *flags]
        if seed:  # of hashes, which all processes share that are forked
            environment = {**os.environ, "PYTHONHASHSEED": seed}
            process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True, env=environment)
        else:
            process = PreforkedProcess(dataserver(*words), stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().removeprefix("listening on ").strip()

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def digest(batch: Batch) -> Digest:
    """Everything of a microbatch that must be the same from every server."""
    return (
        *(batch.step, batch.microbatch, batch.num_microbatches, batch.plan_hash),
        *(batch.text_tokens, batch.target_patches),
        *(
            tuple(a.tolist())
            for a in (batch.items.dataset, batch.items.sample, batch.items.image, batch.items.validity)
        ),
        *((r.source_module, *(a.tobytes() for a in (r.source_rank, r.target_start, r.rows))) for r in batch.routings),
        *((name, str(t.dtype), tuple(t.shape), t.numpy().tobytes()) for name, t in batch.tensors.items()),
    )


def test_views_of_one_plan_as_torch_tensors(address: Address) -> None:
    views: dict[tuple[str, int], list[Batch]] = {}
    for module, rank in VIEWS:
        with DataClient(address, job_data(), module, rank) as client:
            views[module, rank] = list(client)
            assert client.state_dict()["step"] == client.num_steps == 4
    hashes = {name: [(b.step, b.microbatch, b.plan_hash) for b in batches] for name, batches in views.items()}
    assert all(found == hashes["vit", 0] for found in hashes.values())
    backbone = views["llm", 0][0]
    assert backbone.tensors["token_ids"].dtype is torch.int32
    assert len(backbone.tensors["cu_lengths"]) == len(backbone.items) + 1
    encoder = views["vit", 0][0]
    rows, columns = encoder.tensors["grid"].T
    assert int((rows * columns).sum()) == len(encoder.tensors["patches"])
    ways = [r for r in encoder.routings if r.source_module == "vit"]
    assert sum(int(r.rows.sum()) for r in ways) * 4 == len(encoder.tensors["patches"])


def test_any_number_of_servers_with_and_without_compression_gives_the_same_bytes(start) -> None:
    servers = [start()[1], start(seed="1")[1]]
    found = []
    for addresses, options in (
        (servers[:1], {}),
        (servers[1:], {"compress": True}),
        (servers, {"prefetch_bytes": 0}),
    ):
        with DataClient(addresses, job_data(), "vit", 1, **options) as client:
            found.append([digest(b) for b in client])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("signum", "module", "rank"),
    [
        (signal.SIGKILL, "vit", 0),
        (signal.SIGTERM, "llm", 1),
        pytest.param(signal.SIGKILL, "llm", 1, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "vit", 0, marks=pytest.mark.long),
    ],
)
def test_losing_a_server_in_mid_stream_changes_no_byte(start, signum: int, module: str, rank: int) -> None:
    servers = dict(reversed(start()) for _ in range(2))
    with DataClient(list(servers), job_data(), module, rank) as client:
        undisturbed = [digest(b) for b in client]
    with DataClient(list(servers), job_data(), module, rank, prefetch_bytes=0) as client:
        found = [digest(next(client))]
        used = client.fleet.endpoints[client.fleet.current].address
        servers[used].send_signal(signum)
        servers[used].wait(30)
        found += [digest(b) for b in client]
        assert client.fleet.endpoints[client.fleet.current].address != used
    assert found == undisturbed


def test_resume_and_selected_tensors(address: Address) -> None:
    with DataClient(address, job_data(), "llm", 0, tensors=["labels", "cu_lengths"]) as client:
        everything = list(client)
        assert all(set(b.tensors) == {"labels", "cu_lengths"} for b in everything)
    for step in range(5):
        with DataClient(address, job_data(), "llm", 0, tensors=["labels", "cu_lengths"], start_step=step) as client:
            assert [digest(b) for b in client] == [digest(b) for b in everything if b.step >= step]


def test_jobs_are_filled_in_as_the_servers_do_it(address: Address, datasets: dict[str, Path]) -> None:
    catalog = Catalog.open(load_config(None, {"datasets": datasets, "listen": "127.0.0.1:0"}))
    with DataClient(address, job_data(), "llm", 0) as client:
        assert client.job == parse_job(fill_job(job_data(), catalog))
        plan = client.get_plan(1)
        assert plan.plan_hash == next(b for b in client if b.step == 1).plan_hash
        assert client.report_step_times(0, step_time_s=1.0, data_wait_s=0.5)


def test_samples_of_a_microbatch_are_described(address: Address, datasets: dict[str, Path]) -> None:
    with DataClient(address, job_data(), "vit", 0) as client:
        items = next(batch.items for batch in client if len(batch.items))
        for position, name in enumerate(("pairs", "docs")):
            numbers = items.sample[items.dataset == position].tolist()
            found = client.describe_samples(position, numbers)
            shards = Dataset.open(datasets[name]).shards
            assert [(s.shard, s.key) for s in found] == [
                (shards[number >> 32].name, shards[number >> 32].keys()[number & 0xFFFFFFFF]) for number in numbers
            ]
        with pytest.raises(DataServiceError, match="was asked for") as raised:
            client.describe_samples(0, [2**63])
        assert raised.value.reason == "SAMPLE_UNKNOWN"


def test_a_fleet_with_one_server_that_has_other_data(
    address: Address, datasets: dict[str, Path], tmp_path: Path
) -> None:
    """The odd server is at fault, not the job: whoever asks it first goes on at the other one."""
    other = {"pairs": index(write_pairs(tmp_path / "other", 12, 6, seed=9)), "docs": datasets["docs"]}
    settings = load_config(None, {"datasets": datasets, "listen": "127.0.0.1:0"})
    job = parse_job(fill_job(job_data(), Catalog.open(settings)))
    with running(other) as odd:
        for addresses in ([address, odd.address], [odd.address, address]):  # one of them begins with the odd one
            with DataClient(addresses, job, "llm", 0) as client:
                assert len({batch.step for batch in client}) == 4
                assert client.fleet.endpoints[client.fleet.current].address == address
        with pytest.raises(DataServiceError, match="has fingerprint") as raised:
            DataClient(odd.address, job, "llm", 0)
        assert raised.value.reason == "DATASET_MISMATCH"


def test_refusals_of_a_real_server(address: Address) -> None:
    wrong = job_data()
    wrong["stream"]["datasets"][0]["fingerprint"] = "0" * 64
    with pytest.raises(DataServiceError, match="has fingerprint 000") as raised:
        DataClient(address, wrong, "llm", 0)
    assert raised.value.reason == "DATASET_MISMATCH"
    with (
        DataClient(address, job_data(), "llm", 0, tensors=["pixels"]) as client,
        pytest.raises(DataServiceError, match="pixels") as raised,
    ):
        next(client)
    assert raised.value.reason == "TENSOR_UNKNOWN"


def test_a_server_that_restarts_at_the_same_address(start, datasets: dict[str, Path]) -> None:
    process, address = start()
    with DataClient(address, job_data(), "llm", 0) as client:
        undisturbed = [digest(b) for b in client]
    with DataClient(address, job_data(), "llm", 0, prefetch_bytes=0, timeouts=Timeouts(give_up=60)) as client:
        found = [digest(next(client))]
        process.kill()
        process.wait()
        flags = [f for name, path in datasets.items() for f in ("--dataset", f"{name}={path}")]
        words = dataserver("serve", "--listen", address, *flags)
        with PreforkedProcess(words, stdout=subprocess.PIPE, text=True) as again:
            try:
                found += [digest(b) for b in client]
            finally:
                again.kill()
    assert found == undisturbed


def test_labels_are_those_of_the_tokens(address: Address) -> None:
    with DataClient(address, job_data(generation={"ratio": "0"}), "llm", 0) as client:
        for batch in client:
            tokens, labels = batch.tensors["token_ids"].numpy(), batch.tensors["labels"].numpy()
            kept = np.flatnonzero(labels >= 0)
            np.testing.assert_array_equal(labels[kept], tokens[kept + 1])
