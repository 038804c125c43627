"""Servers of two fleets, each with a bucket of its own under the same name, that share one folder of blocks."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks.range_server import State, range_server
from e2e.streams import dataset_flags, digest, read_views, start_servers
from faults.processes import Member
from serving.harness import index, job_data
from shards import write_pairs
from soak.soaking import bytes_of, image_bytes
from stores import AWS, forget_stores, no_stores

from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config

__all__ = ["no_stores"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
URL = Path("s3://bucket/laion")


def job_of(folder: Path) -> Job:
    """A job of two epochs that the folder's fingerprint names."""
    data = job_data(datasets=[{"name": "pairs"}], global_batch=8, end={"epochs": 2}, order_version=2, shuffle_window=2)
    return parse_job(fill_job(data, Catalog.open(load_config(None, {"datasets": {"pairs": folder}}))))


class Fleet:
    """One server with a bucket and a cache of indexes of its own."""

    def __init__(self, stack: ExitStack, root: Path, seed: int, blocks: Path, most: int) -> None:
        root.mkdir()
        folder = index(write_pairs(root / "local", 60, 5, seed=seed, median_size=200))
        self.num_bytes = bytes_of(folder)
        state = State()
        state.put_folder("/bucket/laion", folder)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        variables = {**AWS, "AWS_ENDPOINT_URL": stack.enter_context(range_server(state))}
        for name, value in {**variables, "XDG_CACHE_HOME": str(root / "cache")}.items():
            patch.setenv(name, value)
        forget_stores()
        index(URL)
        self.job = job_of(URL)
        (local,) = start_servers(stack, dataset_flags({"pairs": folder}), 1)
        self.undisturbed = read_views([local], self.job, digest)
        cache = ["--block-cache-dir", blocks, "--block-cache-bytes", str(most), "--block-memory-bytes", "0"]
        self.member = Member([*dataset_flags({"pairs": URL}), *cache], root / "log")
        stack.callback(self.member.close)


@pytest.mark.parametrize("part", [pytest.param(1, marks=pytest.mark.long), 4], ids=["room for all", "room for a part"])
def test_a_folder_of_blocks_serves_two_fleets(no_stores: None, tmp_path: Path, part: int) -> None:
    """Names of objects and jobs are the same, contents are not; each may take as much as the other one."""
    blocks, most = tmp_path / "blocks", 1 << 30
    with ExitStack() as stack:
        if part > 1:
            most = bytes_of(write_pairs(tmp_path / "sized", 60, 5, seed=1, median_size=200)) // part
        fleets = [Fleet(stack, tmp_path / f"fleet {seed}", seed, blocks, most) for seed in (1, 2)]
        assert fleets[0].undisturbed != fleets[1].undisturbed
        for _ in range(2):
            with ThreadPoolExecutor(len(fleets)) as pool:
                found = pool.map(lambda fleet: read_views([fleet.member.address], fleet.job, digest), fleets)
            assert list(found) == [fleet.undisturbed for fleet in fleets]
        for fleet in fleets:
            counts = image_bytes([fleet.member.address])
            assert counts["disks"] > 0
            assert "damaged" not in fleet.member.log.read_text()
            assert "Traceback" not in fleet.member.log.read_text()
        used = sum(path.stat().st_size for path in blocks.glob("*/*.block"))
        # A server looks at what the other one wrote every half minute, and counts its own until then.
        assert used <= sum(min(most, fleet.num_bytes * 11 // 10) for fleet in fleets)
