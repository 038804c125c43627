"""Servers that have other data among good ones: passed over and named, never the end of a client."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import pytest
from e2e.streams import dataset_flags, digest
from faults.processes import Member
from foreign.proxy import proxy
from serving.harness import index, job_data
from shards import write_interleaved, write_pairs

from dataserver.dataset import Dataset, Quarantine
from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import Job, parse_job
from dataserver.serving.config import load_config
from trainclient.client import DataClient
from trainclient.stream.errors import FleetError

pytestmark = pytest.mark.slow


class Servers:
    """One good server, and one of each odd kind."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        good = {
            "pairs": index(write_pairs(root / "pairs", 40, 10, seed=1, median_size=160)),
            "docs": index(write_interleaved(root / "docs", 16, 8, seed=2, median_size=160)),
        }
        other = {**good, "pairs": index(write_pairs(root / "other", 40, 10, seed=9, median_size=160))}
        key = Dataset.open(good["pairs"]).shards[0].keys()[3]
        listed = root / "list"
        Quarantine.from_samples([("00000.tar", key)]).save(listed)
        flags = {
            "good": [*dataset_flags(good), "--quarantine", f"pairs={listed}"],
            "other samples": dataset_flags(other),
            "no quarantine list": dataset_flags(good),
            "a dataset less": dataset_flags({"docs": good["docs"]}),
        }
        with ThreadPoolExecutor(len(flags)) as pool:
            members = pool.map(lambda name: Member(flags[name], root / f"{name}.log"), flags)
            self.members = dict(zip(flags, members, strict=True))
        for found in self.members.values():
            stack.callback(found.close)
        self.good = self.members["good"]
        self.addresses = {name: found.address for name, found in self.members.items()}
        self.addresses["other bytes"] = stack.enter_context(proxy(self.addresses["no quarantine list"], digest="o"))
        known = {"datasets": good, "quarantines": {"pairs": listed}}
        data = job_data(seq_len=640, global_batch=8, end={"steps": 6})
        self.job: Job = parse_job(fill_job(data, Catalog.open(load_config(None, known))))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack, tmp_path_factory.mktemp("odd"))


def test_a_lost_good_server_is_waited_for_while_all_others_are_odd(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    with DataClient(servers.good.address, servers.job, "vit", 0) as alone:
        undisturbed = [digest(batch) for batch in alone]
    # The odd ones come first, so that each is met before and after the good one is lost.
    odd = {name: address for name, address in servers.addresses.items() if name != "good"}
    addresses = [*odd.values(), servers.good.address]
    with DataClient(addresses, servers.job, "vit", 0, prefetch_bytes=0) as client:
        found = [digest(batch) for batch in islice(client, 3)]
        servers.good.kill()
        servers.good.start()
        found += [digest(batch) for batch in client]
    assert found == undisturbed
    # Other bytes are noticed beside another server's: met first, the proxy only fails, as the server behind it refuses.
    beside = ("no server could go on", "Exception calling application")
    for name, address in odd.items():
        named = [text for text in caplog.messages if address in text and not any(words in text for words in beside)]
        assert len(named) == 1, name


def test_an_error_names_every_odd_server_when_no_other_is_left(servers: Servers) -> None:
    addresses = [address for name, address in servers.addresses.items() if name not in ("good", "other bytes")]
    with pytest.raises(FleetError, match="no server can do this") as raised:
        DataClient(addresses, servers.job, "vit", 0)
    assert raised.value.failures.keys() == set(addresses)
