"""A fleet that loses servers: every rank of every module receives the bytes of an undisturbed run."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from cli.server_process import serving
from disttrain.v1.microbatch_pb2 import VALIDITY_INVALID
from e2e.streams import (
    Clients,
    Digest,
    View,
    break_image,
    dataset_flags,
    digest,
    read_views,
    start_servers,
    used_address,
)
from faults.processes import Member
from serving.harness import index, job_data
from shards import write_interleaved, write_pairs

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config

Received = dict[View, list[Digest]]
BROKEN_SHARD, BROKEN_ROW = 1, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pairs, one of them with a broken image, and documents."""
    root = tmp_path_factory.mktemp("fleet")
    sound = index(write_pairs(root / "sound", 40, 10, seed=1, median_size=160, formats=("PNG", "JPEG", "WEBP", "PNG")))
    return {
        "pairs": break_image(sound, root / "pairs", BROKEN_SHARD, BROKEN_ROW),
        "docs": index(write_interleaved(root / "docs", 16, 8, seed=2, median_size=160)),
    }


@pytest.fixture(scope="module")
def job(folders: dict[str, Path]) -> Job:
    """Six steps of four or more microbatches, in which every pair occurs."""
    data = job_data(seq_len=640, global_batch=8, end={"steps": 6}, generation={"ratio": "0.5", "query_tokens": 8})
    return parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": folders}))))


@pytest.fixture(scope="module")
def undisturbed(folders: dict[str, Path], job: Job) -> Received:
    """What one server sends, whose hashes have another seed than those of all others."""
    with serving(*dataset_flags(folders), by_hand=True) as server:
        return read_views([server.address], job, digest)


def test_the_broken_image_is_invalid_wherever_it_occurs(undisturbed: Received) -> None:
    invalid = {
        (dataset, sample)
        for batches in undisturbed.values()
        for batch in batches
        for (dataset, _, sample), validity in zip(batch.samples, batch.validity, strict=True)
        if validity == VALIDITY_INVALID
    }
    assert invalid == {(0, BROKEN_SHARD << 32 | BROKEN_ROW)}


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.long), 3])
def test_any_number_of_servers_sends_the_same_bytes(
    folders: dict[str, Path], job: Job, undisturbed: Received, count: int
) -> None:
    asked: set[str] = set()
    with ExitStack() as stack:
        servers = start_servers(stack, dataset_flags(folders), count)
        found = read_views(
            [*servers], job, digest, {2: lambda clients: asked.update(map(used_address, clients.values()))}
        )
    assert found == undisturbed
    assert len(asked) > 1, "one server did all the work"


class Killer:
    """Kills servers while streams come from them, and knows which streams those are."""

    def __init__(self, stack: ExitStack, flags: list[str], folder: Path) -> None:
        members = [Member(flags, folder / f"{number}.log") for number in range(2)]
        for found in members:
            stack.callback(found.close)
        self.servers = {found.address: found for found in members}
        self.orphans: dict[str, list[View]] = {}

    def kill_busiest(self, clients: Clients) -> Member:
        used = {view: used_address(client) for view, client in clients.items()}
        addresses = [*used.values()]
        victim = max(self.servers, key=addresses.count)
        self.orphans[victim] = [view for view, address in used.items() if address == victim]
        self.servers[victim].kill()
        return self.servers[victim]


def test_kill_9_in_mid_step_while_all_ranks_stream(
    folders: dict[str, Path], job: Job, undisturbed: Received, tmp_path: Path
) -> None:
    after: dict[View, str] = {}
    with ExitStack() as stack:
        killer = Killer(stack, dataset_flags(folders), tmp_path)
        found = read_views(
            [*killer.servers],
            job,
            digest,
            {
                1: lambda clients: killer.kill_busiest(clients) and None,
                5: lambda clients: after.update({view: used_address(client) for view, client in clients.items()}),
            },
        )
    assert found == undisturbed
    ((victim, orphans),) = killer.orphans.items()
    # A small view may have been on its way as a whole already.
    assert any(after[view] != victim for view in orphans)


@pytest.mark.long
def test_each_server_is_killed_once_and_one_comes_back(
    folders: dict[str, Path], job: Job, undisturbed: Received, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        killer = Killer(stack, dataset_flags(folders), tmp_path)

        def kill_the_other(_: Clients) -> None:
            (other,) = (found for address, found in killer.servers.items() if address not in killer.orphans)
            other.kill()

        pauses = {1: lambda clients: killer.kill_busiest(clients).start(), 3: kill_the_other}
        assert read_views([*killer.servers], job, digest, pauses) == undisturbed
        (survivor,) = (killer.servers[address] for address in killer.orphans)
        survivor.drain()
        assert survivor.wait() == 0, survivor.log.read_text()
        assert "Traceback" not in survivor.log.read_text()
