"""A real Prometheus over a real fleet: every query has data, no alert fires, and one does when a server stops."""

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from cli.server_process import ServerProcess, serving
from deploy.manifests import ROOT
from deploy.prometheus_programs import programs
from deploy.test_monitoring import expressions
from monitoring.alerts import GROUPS
from ports import free_addresses
from serving.harness import VIEWS, index, job_data
from shards import write_interleaved, write_pairs

from trainclient.stream.client import ArrayClient
from trainclient.stream.endpoint import Timeouts

__all__ = ["programs"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
RULES = ROOT / "deploy/prometheus/alerts.yaml"
VARIABLES = {"$__rate_interval": "20s", "$job_id": ".*", "$job": ".*", "$instance": ".*", "$module": ".*"}
EMPTY_WITHOUT_TLS = re.compile("disttrain_certificate_expiry_timestamp_seconds")
"""Panels that are empty on a healthy fleet: servers without TLS have no certificate."""
STEP_S = 0.3
"""What a step of the readers takes: longer than making its microbatches."""
WAIT_S = 300


class Prometheus:
    """One that runs."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **query: str) -> Any:
        """The data of an answer of its API."""
        with urlopen(f"http://{self.address}/api/v1/{path}?{urlencode(query)}", timeout=30) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def series(self, expression: str) -> list[Any]:
        """What an expression gives now."""
        for name, value in VARIABLES.items():
            expression = expression.replace(name, value)
        return self.get("query", query=expression)["result"]

    def firing(self) -> set[tuple[str, str]]:
        """Name and instance of all alerts that fire."""
        alerts = self.get("alerts")["alerts"]
        labels = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        return {(label["alertname"], label.get("instance", "")) for label in labels}


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(1)


@contextmanager
def prometheus(program: str, folder: Path, targets: list[str]) -> Iterator[Prometheus]:
    """Scrape servers every second, with the rules as they are."""
    (address,) = free_addresses(1)
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "data-servers", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    line = [
        program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(line, stdout=log, stderr=log) as process:
        found = Prometheus(address)
        try:
            until(lambda: _answers(found))
            yield found
        finally:
            process.terminate()


def _answers(server: Prometheus) -> bool:
    try:
        server.get("targets")
    except OSError:
        return False
    return True


@contextmanager
def readers(addresses: list[str]) -> Iterator[None]:
    """The ranks of all modules of a job, which take a step together every `STEP_S`, as trainers do."""
    ended = threading.Event()
    barrier = threading.Barrier(len(VIEWS))
    failures: list[BaseException] = []
    job = job_data(end={"steps": 100_000})

    def read(module: str, rank: int) -> None:
        try:
            with ArrayClient(addresses, job, module, rank, timeouts=Timeouts(connect=30)) as client:
                for batch in client:
                    if batch.last_of_step:
                        barrier.wait(WAIT_S)
                        time.sleep(STEP_S)
                    if ended.is_set():
                        return
        except threading.BrokenBarrierError:
            pass  # another one has ended
        except BaseException as error:
            failures.append(error)
        finally:
            barrier.abort()

    threads = [threading.Thread(target=read, args=view) for view in VIEWS]
    for thread in threads:
        thread.start()
    try:
        yield
        assert failures == []
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failures == []


@contextmanager
def fleet(folders: dict[str, Path], cache: Path) -> Iterator[tuple[list[ServerProcess], list[str]]]:
    """Two servers that know each other, and where their metrics are."""
    addresses = free_addresses(4)
    datasets = [flag for name, folder in folders.items() for flag in ("--dataset", f"{name}={folder}")]
    fixed = (*datasets, "--decode-threads", "1", "--peers", ",".join(addresses[:2]), "--cache-dir", str(cache))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(*fixed, "--listen", address, "--metrics-listen", metrics))
            for address, metrics in zip(addresses[:2], addresses[2:], strict=True)
        ]
        yield servers, addresses[2:]


def test_promtool_takes_the_rules(programs: dict[str, str]) -> None:
    done = subprocess.run(
        [programs["promtool"], "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(map(len, GROUPS.values()))} rules found" in done.stdout


def test_a_healthy_fleet_fills_the_panels_and_fires_nothing(programs: dict[str, str], tmp_path: Path) -> None:
    folders = {
        "pairs": index(write_pairs(tmp_path / "pairs", 40, 10, seed=1)),
        "docs": index(write_interleaved(tmp_path / "docs", 16, 8, seed=2)),
    }
    alerts = {alert.name: alert.expr for group in GROUPS.values() for alert in group}
    panels = [expression for expression in expressions() if expression not in alerts.values()]
    with (
        fleet(folders, tmp_path / "cache") as (servers, targets),
        prometheus(programs["prometheus"], tmp_path, targets) as server,
        readers([one.address for one in servers]),
    ):
        until(lambda: len(server.series("disttrain_rank_waited_seconds_total")) == len(VIEWS))
        time.sleep(60)
        empty = [expression for expression in panels if not server.series(expression)]
        assert [expression for expression in empty if not EMPTY_WITHOUT_TLS.search(expression)] == []
        assert {name: found for name, expr in alerts.items() if (found := server.series(expr))} == {}
        assert server.get("alerts")["alerts"] == []
        assert len(server.get("rules")["groups"]) == len(GROUPS)
        assert servers[1].end()[0] == 0
        until(server.firing)
        assert server.firing() == {("DistTrainServerDown", targets[1])}
