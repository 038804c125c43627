"""The page of a step gives what the planner says, and what ranks reported."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import yaml
from disttrain.v1 import data_service_pb2 as pb
from fleet.servers import until
from google.protobuf.duration_pb2 import Duration
from serving.harness import TIMEOUT_S, Running, index, job_data, running
from shards import write_interleaved, write_pairs
from web.harness import get
from web.test_dataset_page import ask, worked

from dataserver.cli.jobs import planner_of
from dataserver.jobs import Catalog, JobPlanner
from dataserver.planning.planner import ablation, explain
from dataserver.reporting.fleet_calls import NamedServers
from dataserver.security import Channels
from dataserver.serving.config import load_config
from dataserver.web.background import Background
from dataserver.web.datasets import DatasetPages, LocalData
from dataserver.web.jobs import FileJob
from dataserver.web.reports import StepReports
from dataserver.web.server import RequestError, WebServer
from dataserver.web.steps import StepPages, step_routes

STEP = 1


class Site:
    """A page, the server that it asks, and the job's own planner."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        self.shown = {"pairs", "docs"}
        datasets = {
            "pairs": index(write_pairs(root / "pairs", 40, 16, seed=1)),
            "docs": index(write_interleaved(root / "docs", 24, 8, seed=2)),
        }
        self.server: Running = stack.enter_context(running(datasets))
        job = root / "job.yaml"
        job.write_text(yaml.safe_dump(job_data()))
        settings = load_config(None, {"datasets": datasets})
        catalog, work = Catalog.open(settings), Background()
        stack.callback(work.close)
        pages = DatasetPages(LocalData(catalog, settings.datasets, {}), work, lambda: dict.fromkeys(self.shown, ""))
        times = StepReports(NamedServers((self.server.address, "127.0.0.1:1"), Channels()))
        stack.callback(times.close)
        self.planner: JobPlanner = planner_of(job, catalog)
        self.steps = StepPages(
            FileJob(lambda: planner_of(job, catalog), ("pairs", "docs"), lambda name: pages.named({"dataset": name})),
            catalog.datasets, work, times,
        )  # fmt: skip
        web = WebServer("127.0.0.1", 0, step_routes(self.steps))
        stack.callback(web.close)
        self.address = web.address


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack, tmp_path_factory.mktemp("steps"))


def test_a_step_is_planned_as_servers_plan_it(site: Site) -> None:
    found = worked(site.address, "step", step=STEP)
    job_id = site.server.create(job_data()).job_id
    request = pb.GetPlanRequest(job_id=job_id, step=STEP)
    plan = site.server.stub.GetPlan(request, timeout=TIMEOUT_S).plan
    assert (found["job"], found["plan"]) == (job_id, plan.plan_hash.hex())
    assert found["after"]["makespan_ns"] == plan.makespan_after_ns
    assert found["before"]["makespan_ns"] == plan.makespan_before_ns
    assert found["bound_ns"] == plan.lower_bound_ns
    assert {load["module"]: load["after"] for load in found["loads"]} == {
        load.module: list(load.after_ns) for load in plan.loads
    }
    assert [c["step_ns"] for c in found["candidates"]] == [c.makespan_ns for c in plan.candidates]
    expected = ablation(site.planner.job, site.planner.plan(STEP))
    assert [row["step_ns"] for row in found["ablation"]] == [entry.makespan_ns for entry in expected]


def test_what_the_step_costs_is_its_critical_path(site: Site) -> None:
    found = worked(site.address, "step", step=STEP)
    bars = found["after"]["bars"]
    assert max(bars["end"]) == found["after"]["makespan_ns"]
    on_path = [e - s for s, e, c in zip(bars["start"], bars["end"], bars["critical"], strict=True) if c]
    assert sum(found["after"]["critical_ns"].values()) == sum(on_path)
    assert sum(node["ns"] for node in found["costly_nodes"]) <= sum(on_path)
    assert found["costly_operations"][0]["ns"] == max(on_path)
    sample = next(o["sample"] for o in found["costly_operations"] if o["sample"])
    assert sample["dataset"] in ("pairs", "docs")
    assert sample["key"]
    summary = explain(site.planner.job, site.planner.plan(STEP))
    assert found["after"]["nodes"] == len(summary.after.nodes)


def reports(site: Site, job_id: str, factor: float) -> Iterator[pb.StepTimes]:
    planned = explain(site.planner.job, site.planner.plan(STEP)).after
    for n, node in enumerate(planned.nodes):
        forward = [round(ns * factor) for ns in planned.pipeline.forward_ns[n].tolist()]
        backward = [round(ns * factor) for ns in planned.pipeline.backward_ns[n].tolist()]
        yield pb.StepTimes(
            job_id=job_id, step=STEP, module=node.modules[0], rank=node.rank, stage=node.stage, forward_ns=forward,
            backward_ns=backward, step_time=Duration(seconds=2), data_wait=Duration(nanos=3_000_000 + node.rank),
        )  # fmt: skip


def test_measured_passes_stand_beside_the_planned_ones(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataserver.web.reports.REMEMBERED_S", 0.0)
    worked(site.address, "step", step=STEP)
    silent = [{"server": "127.0.0.1:1", "why": "does not answer"}]
    nothing = worked(site.address, "step/measured", step=STEP)
    assert (nothing["reports"], nothing["rows"], nothing["timeline"], nothing["silent"]) == (0, [], None, silent)
    job_id = site.server.create(job_data()).job_id
    sent = list(reports(site, job_id, 2.0))
    for times in sent:
        site.server.stub.ReportStepTimes(pb.ReportStepTimesRequest(times=times), timeout=TIMEOUT_S)
    found = worked(site.address, "step/measured", step=STEP)
    planned = worked(site.address, "step", step=STEP)["after"]
    assert found["reports"] == len(found["rows"]) == len(sent) == found["replaced"] == found["expected"]
    assert {row["wait_ns"] for row in found["rows"]} == {3_000_000, 3_000_001}
    assert {row["step_ns"] for row in found["rows"]} == {2 * 10**9}
    for row in found["rows"]:
        assert row["computed_ns"] == 2 * row["planned_ns"]
    assert found["timeline"]["labels"] == planned["labels"]
    transfers = planned["makespan_ns"] - sum(planned["critical_ns"].values())
    assert found["timeline"]["makespan_ns"] == pytest.approx(2 * planned["makespan_ns"] - transfers, rel=0.01)


def test_other_policies_are_compared(site: Site) -> None:
    found = worked(site.address, "step/policies", step=STEP)
    own = [row for row in found if row["own"]]
    assert [row["step_ns"] for row in own] == [worked(site.address, "step", step=STEP)["after"]["makespan_ns"]]
    assert len(found) > 3
    assert all(row["changes"] or row["own"] for row in found)


@pytest.mark.parametrize("step", ["-1", "x", "1" * 30, ""])
def test_hostile_steps_are_refused(site: Site, step: str) -> None:
    found = get(site.address, f"/api/step?step={step}")
    assert found.status == (200 if step == "" else 400)


def test_a_step_beyond_the_job_is_an_error_in_words(site: Site) -> None:
    answer: Any = {"working": {}}
    while "working" in answer:
        answer = ask(site.address, "step", step=4000)
    assert "ends after step 3" in answer["error"]


def test_of_a_job_that_cannot_be_opened_strangers_learn_nothing() -> None:
    def broken() -> Any:
        raise ValueError("the job names column secret")

    shown: set[str] = set()
    catalog, work, reports = Catalog({}, {}), Background(), StepReports(NamedServers((), Channels()))
    data = DatasetPages(LocalData(catalog, {}, {}), work, lambda: dict.fromkeys(shown, ""))
    job = FileJob(broken, ("pairs",), lambda name: data.named({"dataset": name}))
    pages = StepPages(job, {}, work, reports)
    assert work.ask("job", lambda _: job.planner(), is_wanted_later=True) == {"working": ANY}
    for ask_for in (pages.step, pages.policies, pages.measured, pages.listed):
        with pytest.raises(RequestError, match="no dataset is named 'pairs'"):
            ask_for({"step": "0"})
    until(lambda: work.ask("job", lambda _: job.planner()) == {"error": "no dataset is named 'pairs'"})
    work.close()


def test_a_job_whose_datasets_may_not_be_shown_is_not_shown(site: Site) -> None:
    worked(site.address, "step", step=STEP)
    site.shown = {"docs"}
    try:
        for path in ("step", "step/policies", "step/measured"):
            assert ask(site.address, path, 404, step=STEP) == {"error": "no dataset is named 'pairs'"}
    finally:
        site.shown = {"pairs", "docs"}
