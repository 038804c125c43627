"""`dataserver plan` and `simulate` on jobs of every layout."""

import copy
import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.server_process import run
from shards import write_pairs

from dataserver.cli.jobs import DataFlags, open_job
from dataserver.planning.planner import explain

Trace = list[dict[str, Any]]
STREAM: dict[str, Any] = {
    "datasets": [{"name": "d"}],
    "seq_len": 512,
    "global_batch": 8,
    "sizing": {"max_patches": 256},
    "generation": {"ratio": "0.4", "query_tokens": 8},
}
COLOCATED: dict[str, Any] = {
    "stream": STREAM,
    "execution": {
        "layout": {"kind": "colocated", "ranks_per_node": 2},
        "modules": [
            {"name": "vit", "kind": "encoder", "dp": 4},
            {"name": "llm", "kind": "backbone", "dp": 4},
            {"name": "dit", "kind": "generator", "dp": 4},
        ],
        "end": {"steps": 2},
    },
}
CONTRASTIVE: dict[str, Any] = {
    "stream": {
        "datasets": [{"name": "d"}],
        "seq_len": 512,
        "global_batch": 16,
        "contrastive_batch": 8,
        "packing": {"enabled": False},
        "sizing": {"max_patches": 256},
    },
    "execution": {
        "layout": {"kind": "contrastive", "microbatches": 2, "interaction_ns": 5_000_000},
        "modules": [
            {"name": "images", "kind": "tower", "modality": "image", "dp": 2, "pp": 2},
            {"name": "texts", "kind": "tower", "modality": "text"},
        ],
        "end": {"steps": 2},
    },
}
GROUPED: dict[str, Any] = {
    "stream": {**STREAM, "global_batch": 24, "generation": {"ratio": "0"}, "packing": {"enabled": False}},
    "execution": {
        "layout": {
            "kind": "grouped",
            "max_degree": 4,
            "exchange": [{"degree": 2, "unit_ps": 8_000_000}, {"degree": 4, "unit_ps": 16_000_000}],
        },
        "modules": [
            {"name": "vit", "kind": "encoder"},
            {"name": "llm", "kind": "backbone", "dp": 4, "memory": {"budget_bytes": 200, "unit_bytes": 1}},
        ],
        "end": {"steps": 2},
    },
}


class Command:
    """`dataserver` over one dataset and job."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.folder = folder
        self.file = folder.parent / f"{'-'.join(m['name'] for m in job['execution']['modules'])}.yaml"
        self.file.write_text(yaml.safe_dump(job))

    def __call__(self, command: str, *more: str | Path) -> str:
        """What a command prints."""
        done = run(command, "--job", self.file, "--dataset", f"d={self.folder}", *more)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def plan(self) -> dict[str, Any]:
        """Step 0 as JSON."""
        found: dict[str, Any] = json.loads(self("plan", "--step", "0", "--json"))
        return found

    def trace(self, file: Path) -> Trace:
        """The events of step 0."""
        self("plan", "--step", "0", "--trace", file)
        found: Trace = json.loads(file.read_text())["traceEvents"]
        return found

    def rows(self, *more: str) -> list[dict[str, Any]]:
        """The comparison of two steps."""
        found: list[dict[str, Any]] = json.loads(self("simulate", "--json", *more))["rows"]
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_pairs(tmp_path_factory.mktemp("layouts") / "d", 60, 16)
    assert run("index", path).returncode == 0
    return path


def threads(trace: Trace) -> dict[tuple[int, int], Trace]:
    """The operations of each thread but the critical path, in their order."""
    found: dict[tuple[int, int], Trace] = defaultdict(list)
    for event in trace:
        if event["ph"] == "X" and event["cat"] != "critical":
            found[event["pid"], event["tid"]].append(event)
    for events in found.values():
        for before, after in pairwise(events):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    return found


def fills(picture: str) -> dict[str, int]:
    """How many bars of an .svg picture have each colour; white edges are those of bars."""
    bars = re.findall(r'style="fill: (#[0-9a-f]{6})(?:; [a-z-]*opacity: [0-9.]+)?; stroke: #ffffff', picture)
    return {colour: bars.count(colour) for colour in set(bars)}


@pytest.fixture(scope="module")
def colocated(folder: Path) -> Command:
    return Command(folder, COLOCATED)


def test_a_colocated_plan_says_what_was_decided(colocated: Command) -> None:
    plan, shown = colocated.plan(), colocated("plan", "--step", "0")
    assert "colocated layout" in shown
    assert {d["subject"] for d in plan["decisions"]} >= {"vit", "llm", "dit"}
    for decision in plan["decisions"]:
        assert decision["chosen"] in shown
        assert decision["reason"].split()[0] in shown
    assert int(plan["makespan_before_ns"]) >= int(plan["makespan_after_ns"]) >= int(plan["lower_bound_ns"]) > 0


def test_ranks_that_run_all_modules_are_one_process(colocated: Command, tmp_path: Path) -> None:
    plan, trace = colocated.plan(), colocated.trace(tmp_path / "t.json")
    names = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {"vit + llm + dit", "critical path"}
    rows = threads(trace)
    assert len(rows) == 4
    expected = {
        f"{m} {way} {k}" for m in ("vit", "llm", "dit") for way in "FB" for k in range(plan["num_microbatches"])
    }
    for events in rows.values():
        assert {e["name"] for e in events} <= expected
        assert [e["name"].split()[0] for e in events if e["name"].endswith("F 0")] == ["vit", "llm", "dit"]


def test_a_picture_of_ranks_that_run_all_modules(colocated: Command, tmp_path: Path) -> None:
    colocated("plan", "--step", "0", "--plot", tmp_path / "p.svg")
    picture = (tmp_path / "p.svg").read_text()
    for rank in range(4):
        assert picture.count(f">rank {rank}</text>") == 2
    assert {"#4477aa", "#ee7733", "#228833"} <= set(fills(picture))
    for words in (">vit</text>", ">idle</text>", ">critical path</text>", "before: canonical order", "after: planned"):
        assert words in picture
    assert ">interaction</text>" not in picture
    colocated("plan", "--step", "0", "--plot", tmp_path / "p.html")
    assert "Decisions" in (tmp_path / "p.html").read_text()


def test_comparison_of_colocated_policies(colocated: Command) -> None:
    rows = colocated.rows()
    by_name = {(row["dimension"], row["name"]): row for row in rows}
    grid = [row["name"] for row in rows if row["dimension"] == "packing, balance"]
    assert sorted(grid) == sorted(f"{p}, {b}" for p in ("balanced", "best_fit") for b in ("lpt", "none"))
    assert (rows[0]["name"], rows[0]["own"]) == ("balanced, lpt", True)
    assert not any("refusal" in row for row in rows)
    as_balanced = by_name["assignment to ranks", "as balanced"]
    assert as_balanced["changes"] == {"layout": {"kind": "colocated", "ranks_per_node": 4}}
    assert as_balanced["step_ns"] == rows[0]["step_ns"]
    assert 0 <= rows[0]["between_nodes_bytes"] <= as_balanced["between_nodes_bytes"]
    assert by_name["packing, balance", "best_fit, none"]["between_nodes_bytes"] == 0, "every image beside its sequence"
    assert rows[0]["step_ns"] <= by_name["packing, balance", "best_fit, none"]["step_ns"]
    shown = colocated("simulate", "--steps", "1")
    assert max(map(len, shown.splitlines())) <= 110
    assert "assignment to ranks" in shown


def test_smaller_nodes_have_more_bytes_between_them(colocated: Command) -> None:
    alone = copy.deepcopy(COLOCATED)
    alone["execution"]["layout"]["ranks_per_node"] = 1
    own = colocated.rows("--steps", "1")[0]["between_nodes_bytes"]
    smaller = Command(colocated.folder, alone).rows("--steps", "1")[0]["between_nodes_bytes"]
    assert smaller >= own
    assert smaller > 0
    assert smaller % 8192 == 0


@pytest.fixture(scope="module")
def contrastive(folder: Path) -> Command:
    return Command(folder, CONTRASTIVE)


def test_a_contrastive_plan_says_where_each_tower_has_a_sample(contrastive: Command) -> None:
    plan, shown = contrastive.plan(), contrastive("plan", "--step", "0")
    assert {c["name"] for c in plan["candidates"]} >= {"batch_sync, balanced", "distmm_pipe, balanced"}
    lines = shown.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:3] == ["set", "epoch", "shard"])
    assert lines[head - 1].split() == ["images", "micro-", "texts", "micro-"]
    assert lines[head].split()[-6:] == ["rank", "batch", "slot", "rank", "batch", "slot"]
    shown_places = [tuple(map(int, line.split()[-6:])) for line in lines[head + 2 : head + 18]]
    towers = [
        dict(zip(a["item"], zip(a["rank"], a["microbatch"], a["slot"], strict=True), strict=True))
        for a in plan["arrangements"]
    ]  # every sample has one image, so that images and samples have the same numbers
    assert shown_places == [(*towers[0][i], *towers[1][i]) for i in range(16)]
    assert "contrastive" in lines[head + 2]


def test_interactions_are_in_the_trace(contrastive: Command, tmp_path: Path) -> None:
    trace = contrastive.trace(tmp_path / "t.json")
    assert {e["args"]["name"] for e in trace if e["name"] == "process_name"} == {"images", "texts", "critical path"}
    rows = threads(trace)
    assert len(rows) == 5
    interactions = [e for events in rows.values() for e in events if e["cat"] == "interaction"]
    assert {e["name"] for e in interactions} == {"I 0", "I 1"}
    assert len(interactions) == 2 * 3, "two contrastive batches, on the last stages of three ranks"
    assert {e["dur"] for e in interactions} == {5_000}
    assert {e["args"]["contrastive_batch"] for e in interactions} == {0, 1}
    forwards = [e for events in rows.values() for e in events if e["cat"] == "forward" and e["args"]["stage"] == 0]
    for tower in ("images", "texts"):
        process = next(e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"] == tower)
        assert sum(e["args"]["samples"] for e in forwards if e["pid"] == process) == 16


def test_interactions_are_in_the_picture(contrastive: Command, tmp_path: Path) -> None:
    contrastive("plan", "--step", "0", "--plot", tmp_path / "p.svg")
    picture = (tmp_path / "p.svg").read_text()
    assert fills(picture)["#222222"] == 2 * 2 * 3, "before and after"
    for words in (">interaction</text>", ">images 1, stage 1</text>", ">texts 0</text>"):
        assert words in picture
    contrastive("plan", "--step", "0", "--plot", tmp_path / "p.html")
    assert "<td>interaction</td>" in (tmp_path / "p.html").read_text()


def test_comparison_of_contrastive_policies(contrastive: Command) -> None:
    rows = contrastive.rows()
    by_name = {(row["dimension"], row["name"]): row for row in rows}
    assert {name for group, name in by_name if group == "schedule, balance"} == {
        "distmm_pipe, lpt", "distmm_pipe, none", "batch_sync, lpt", "batch_sync, none",
    }  # fmt: skip
    assert {name for group, name in by_name if group == "extra_in_flight"} == {"1", "2", "4"}
    assert rows[0]["own"]
    assert "fill_percent" not in rows[0]
    assert rows[0]["step_ns"] <= by_name["schedule, balance", "batch_sync, lpt"]["step_ns"]
    assert by_name["schedule, balance", "batch_sync, none"]["changes"]["layout"] == {
        "kind": "contrastive", "schedule": "batch_sync", "microbatches": 2, "interaction_ns": 5_000_000,
    }  # fmt: skip
    assert max(map(len, contrastive("simulate", "--steps", "1").splitlines())) <= 110


@pytest.fixture(scope="module")
def grouped(folder: Path) -> Command:
    return Command(folder, GROUPED)


def test_groups_are_listed_by_microbatch(grouped: Command) -> None:
    plan, shown = grouped.plan(), grouped("plan", "--step", "0")
    degrees: dict[int, list[int]] = defaultdict(list)
    for microbatch, degree in zip(plan["groups"]["microbatch"], plan["groups"]["degree"], strict=True):
        degrees[microbatch].append(degree)
    assert len(degrees) == plan["num_microbatches"]
    names = {(4,): "<4>", (2, 2): "<2 x 2>", (2, 1, 1): "<2, 1 x 2>", (1, 1, 1, 1): "<1 x 4>"}
    backbone = next(a for a in plan["arrangements"] if a["module"] == "llm")
    tokens: Counter[int] = Counter()
    for item, microbatch in zip(backbone["item"], backbone["microbatch"], strict=True):
        tokens[microbatch] += plan["samples"]["tokens"][item]
    for microbatch, found in degrees.items():
        composition = names[tuple(sorted(found, reverse=True))]
        cells = str(microbatch), re.escape(composition), str(backbone["microbatch"].count(microbatch))
        assert re.search(rf"^ *{' +'.join(cells)} +{tokens[microbatch]} *$", shown, re.MULTILINE), cells
    assert len({tuple(sorted(found)) for found in degrees.values()}) > 1, "groups differ between microbatches"


def test_all_ranks_of_a_group_hold_its_samples(grouped: Command, tmp_path: Path) -> None:
    plan, trace = grouped.plan(), grouped.trace(tmp_path / "t.json")
    process = next(e["pid"] for e in trace if e["name"] == "process_name" and e["args"]["name"] == "llm")
    held = {
        (e["args"]["rank"], e["args"]["microbatch"]): (e["args"]["tokens"], e["dur"])
        for events in threads(trace).values()
        for e in events
        if e["pid"] == process and e["cat"] == "forward"
    }
    groups = zip(*(plan["groups"][key] for key in ("microbatch", "first_rank", "degree")), strict=True)
    for microbatch, first, degree in groups:
        assert len({held[rank, microbatch] for rank in range(first, first + degree)}) == 1
        if degree > 1:
            assert held[first, microbatch][0] > 0


def test_groups_are_boxes_in_the_picture(grouped: Command, tmp_path: Path) -> None:
    planner = open_job(grouped.file, DataFlags((f"d={grouped.folder}",)))
    summary = explain(planner.job, planner.plan(0))
    grouped("plan", "--step", "0", "--plot", tmp_path / "p.svg")
    bars = fills((tmp_path / "p.svg").read_text())
    groups = len(summary.plan.groups.degree) + len(summary.baseline.groups.degree)
    assert bars["#ee7733"] == 2 * groups, "a forward and a backward of each"
    nodes = 4 * (summary.plan.num_microbatches + summary.baseline.num_microbatches)
    assert groups < nodes
    grouped("plan", "--step", "0", "--plot", tmp_path / "p.html")
    assert "Sequence-parallel groups" in (tmp_path / "p.html").read_text()


def test_comparison_of_group_policies(grouped: Command) -> None:
    found = json.loads(grouped("simulate", "--json"))
    rows = found["rows"]
    by_name = {(row["dimension"], row["name"]): row for row in rows}
    assert {name for group, name in by_name if group == "groups"} == {"search", "homogeneous", "static"}
    search, static = by_name["groups", "search"], by_name["groups", "static"]
    assert search["own"]
    assert search["step_ns"] <= static["step_ns"]
    assert static["changes"] == {"layout": {**GROUPED["execution"]["layout"], "policy": "static"}}
    first, *_, last = found["ablation"]
    assert (first["name"], round(last["step_ns"])) == ("groups of the largest degree", search["step_ns"])
    assert first["step_ns"] >= last["step_ns"]
    assert not any(group == "balance of llm" for group, _ in by_name)
    assert max(map(len, grouped("simulate", "--steps", "1").splitlines())) <= 110
