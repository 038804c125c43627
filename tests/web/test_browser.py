"""The pages in a real browser, before real servers and one that claims a thousand ranks and hostile names."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders.jobs import module
from cli.test_top import Liar, grpc_server, half_read
from disttrain.v1 import admin_service_pb2 as pb
from disttrain.v1 import data_service_pb2 as pb_data
from google.protobuf.duration_pb2 import Duration
from serving.harness import FIXED_WINDOW, Running, index, job_data, running
from shards import break_images, write_pairs
from web.test_dataset_page import odd_members

from dataserver.cli.jobs import planner_of
from dataserver.jobs import Catalog
from dataserver.planning.planner import explain
from dataserver.reporting.fleet_calls import NamedServers
from dataserver.security import Channels
from dataserver.serving.config import load_config
from dataserver.web.background import Background
from dataserver.web.datasets import DatasetPages, LocalData
from dataserver.web.fleet_page import FleetPage
from dataserver.web.fleet_watch import FleetWatch
from dataserver.web.jobs import FileJob
from dataserver.web.reports import StepReports
from dataserver.web.samples import dataset_routes
from dataserver.web.server import WebServer
from dataserver.web.server_pages import ServerPages
from dataserver.web.steps import StepPages, step_routes

BROWSER = Path(__file__).parent / "browser.mjs"
HOSTILE = "<img src=x onerror=alert(1)>"
PAGES = ("fleet", "dataset", "step?step=1")
pytestmark = pytest.mark.long


class Crowd(Liar):
    """A server that says it has a thousand ranks, some with names that a page must not run."""

    def GetMetrics(self, _request: Any, _context: Any) -> pb.GetMetricsResponse:  # noqa: N802
        self.calls += 1
        ranks = [pb.RankProgress(job="eabb7b144187", module="backbone", rank=r, step=900 - r % 97 // 90 * (r % 13),
                                 ready_microbatches=r % 5) for r in range(1000)]  # fmt: skip
        ranks += [pb.RankProgress(job=HOSTILE, module=HOSTILE, rank=r, step=1 + 500 * r) for r in range(2)]
        return pb.GetMetricsResponse(
            uptime=Duration(seconds=2 * self.calls),
            open_streams=1001,
            decoded_images=9000 * self.calls,
            sent_bytes=10**9 * self.calls,
            cores=64,
            wanted_cores=71.5,
            storage_errors=3,
            waits=pb.StageWaits(
                planning=Duration(seconds=self.calls),
                decoding=Duration(seconds=6 * self.calls),
                consumer=Duration(seconds=3 * self.calls),
            ),
            plans_by_source=pb.PlanSources(own=40, fetched=360, late=2),
            ranks=ranks,
        )


@pytest.fixture(scope="module")
def playwright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("node", "npm", "chromium"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: Node.js 20 with npm, and Debian's chromium, are required")
    if found := os.environ.get("DISTTRAIN_PLAYWRIGHT"):
        return Path(found)
    folder = tmp_path_factory.mktemp("playwright")
    line = [
        "npm",
        "install",
        "--prefix",
        str(folder),
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "playwright-core@1",
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode:
        pytest.skip(f"playwright-core cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, list[str]]]:
    """Pages of a fleet, pages of a server, and the jobs of the server."""
    root = tmp_path_factory.mktemp("site")
    folder = write_pairs(root / "laion", 60, 20, seed=1, median_size=200)
    odd_members(folder, 150)
    index(folder)
    break_images(folder, (3, 0))
    with ExitStack() as stack:
        server = stack.enter_context(running({"d": folder}, FIXED_WINDOW, web_listen="127.0.0.1:0"))
        crowd = stack.enter_context(grpc_server(Crowd()))
        settings = load_config(None, {"datasets": {"d": folder}})
        local, work = LocalData(Catalog.open(settings), settings.datasets, {}), Background()
        stack.callback(work.close)
        watch = FleetWatch(NamedServers((server.address, crowd, "127.0.0.1:1"), Channels()), 0.5)
        stack.callback(watch.close)
        pages, reported = steps(root, server, local, work)  # which waits for kernels, before a call does
        stream, read = half_read(server)
        stack.callback(stream.cancel)
        own = ServerPages(server.server, "127.0.0.1:0")
        stack.callback(own.close)
        routes = {"/api/fleet": FleetPage(watch).document, **dataset_routes(DatasetPages(local, work, None))}
        routes |= step_routes(pages)
        web = WebServer("127.0.0.1", 0, routes)
        stack.callback(web.close)
        watch.start()
        yield web.url, own.url, [read, reported]


def steps(root: Path, server: Running, local: LocalData, work: Background) -> tuple[StepPages, str]:
    """The pages of a job whose ranks have reported a step, slower than planned; and the job."""
    modules = [module("encoder", dp=4), module("backbone", dp=4, pp=2)]
    data = job_data(
        datasets=[{"name": "d"}], modules=modules, end={"steps": 3}, generation={"ratio": "0"}, global_batch=24
    )
    job = root / "job.yaml"
    job.write_text(yaml.safe_dump(data))
    planner = planner_of(job, local.catalog)
    planned = explain(planner.job, planner.plan(1)).after
    server.create(data)
    for n, node in enumerate(planned.nodes):
        forward, backward = planned.pipeline.forward_ns[n], planned.pipeline.backward_ns[n]
        times = pb_data.StepTimes(
            job_id=planner.job.job_id, step=1, module=node.modules[0], rank=node.rank, stage=node.stage,
            forward_ns=(forward * (10 + node.rank) // 10).tolist(), backward_ns=(backward * 11 // 10).tolist(),
            step_time=Duration(nanos=planned.makespan_ns * 5 // 4), data_wait=Duration(nanos=node.rank * 90_000),
        )  # fmt: skip
        server.stub.ReportStepTimes(pb_data.ReportStepTimesRequest(times=times), timeout=60)
    reports = StepReports(NamedServers((server.address,), Channels()))
    shown = FileJob(lambda: planner_of(job, local.catalog), ("d",), lambda _: None)
    return StepPages(shown, local.catalog.datasets, work, reports), planner.job.job_id


def test_every_page_in_both_themes_at_a_phones_width_and_by_keyboard(
    site: tuple[str, str, list[str]], playwright: Path, tmp_path: Path
) -> None:
    folder = Path(os.environ.get("DISTTRAIN_SCREENSHOTS", tmp_path))
    url, own, jobs = site
    line = ["node", str(BROWSER), str(playwright), shutil.which("chromium") or "", url, str(folder), own, *PAGES]
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["dialogs"] == [], "something of a stranger ran"
    assert seen["requests"] == [], "nothing is fetched from elsewhere"
    refused = f"/api/step?step=0&job={'0' * 64}"
    assert [error for error in seen["errors"] if "/api/dataset/picture" not in error and refused not in error] == []
    assert sorted(seen["jobs"]) == sorted(jobs)
    assert sorted(seen["chosen"]) == sorted(jobs), "the other one was chosen"
    assert {page: wide for page, wide in seen["wide"].items() if wide > 0} == {}, "pages fit their windows"
    assert HOSTILE in seen["texts"]["fleet"]
    assert "1,003 ranks" in seen["texts"]["fleet"]
    assert HOSTILE in seen["texts"]["dataset"]
    assert "Measured passes" in seen["texts"]["step"]
    assert seen["keys"][0].startswith("#dataset")
    assert seen["keys"][1:] == ["key", 0, "dark"]
    assert seen["frames"] < 500, "a thousand ranks, and the page answers"
