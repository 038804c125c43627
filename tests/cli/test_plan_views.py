"""Pictures, pages and traces of `dataserver plan`."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from cli.server_process import refused, run
from faults.disk import fill, missing, small_disk
from PIL import Image
from shards import write_interleaved, write_pairs

from dataserver.cli.jobs import DataFlags, open_job
from dataserver.cli.pictures import svg_of_plan
from dataserver.planning.planner import explain
from dataserver.reporting.timelines import bars_of, labels_of

JOB = {
    "stream": {
        "datasets": [{"name": "pairs"}, {"name": "documents"}],
        "seq_len": 1024,
        "global_batch": 8,
        "sizing": {"max_patches": 256},
        "generation": {"ratio": "0.4", "query_tokens": 8},
    },
    "execution": {
        "modules": [
            {"name": "vit", "kind": "encoder"},
            {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2},
            {"name": "dit", "kind": "generator", "dp": 2},
        ],
        "end": {"steps": 2},
    },
}
Trace = dict[str, Any]


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """The command, without what it is to write."""
    folder = tmp_path_factory.mktemp("views")
    write_pairs(folder / "pairs", 60, 16)
    write_interleaved(folder / "documents")
    assert run("index", folder / "pairs", folder / "documents").returncode == 0
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    datasets = [part for name in ("pairs", "documents") for part in ("--dataset", f"{name}={folder / name}")]
    return "plan", "--job", folder / "job.yaml", "--step", "1", *datasets


@pytest.fixture(scope="module")
def plan(line: tuple[str | Path, ...]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*line, "--json").stdout)
    return found


@pytest.fixture(scope="module")
def trace(line: tuple[str | Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    file = tmp_path_factory.mktemp("trace") / "t.json"
    done = run(*line, "--trace", file)
    assert done.returncode == 0, done.stderr
    found: Trace = json.loads(file.read_text())
    return found


def complete(trace: Trace) -> list[dict[str, Any]]:
    """Operations, without the copies that make up the critical path."""
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] != "critical"]


def named(trace: Trace, what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == what}


def test_a_process_for_each_module_and_a_thread_for_each_rank_and_stage(trace: Trace) -> None:
    processes = named(trace, "process_name")
    assert list(processes.values()) == ["vit", "llm", "dit", "critical path"]
    threads = [(processes[pid, 0], name) for (pid, _), name in named(trace, "thread_name").items()]
    assert threads == [
        ("vit", "vit 0"),
        *(("llm", f"llm {rank}, stage {stage}") for stage in range(2) for rank in range(2)),
        *(("dit", f"dit {rank}") for rank in range(2)),
        ("critical path", "critical path"),
    ]
    assert {(e["pid"], e["tid"]) for e in complete(trace)} == set(named(trace, "thread_name")) - {(3, 0)}


def test_every_microbatch_runs_forward_and_backward_on_every_thread_one_after_the_other(
    trace: Trace, plan: dict[str, Any]
) -> None:
    names = [f"{way} {k}" for way in "FB" for k in range(plan["num_microbatches"])]
    threads = defaultdict(list)
    for event in complete(trace):
        threads[event["pid"], event["tid"]].append(event)
    assert len(threads) == 7
    for events in threads.values():
        assert sorted(e["name"] for e in events) == sorted(names)
        for before, after in pairwise(events):
            assert before["dur"] >= 0
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-6
    ends = [e["ts"] + e["dur"] for e in complete(trace)]
    assert max(ends) == pytest.approx(int(plan["makespan_after_ns"]) / 1e3)


def test_operations_say_what_they_hold(trace: Trace, plan: dict[str, Any]) -> None:
    samples, placed = plan["samples"], next(a for a in plan["arrangements"] if a["module"] == "llm")
    held: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for item, rank, microbatch in zip(placed["item"], placed["rank"], placed["microbatch"], strict=True):
        held[rank, microbatch][0] += 1
        held[rank, microbatch][1] += samples["tokens"][item]
    backbone = [e["args"] for e in complete(trace) if e["pid"] == 1]
    for about in backbone:
        assert [about["samples"], about["tokens"]] == held[about["rank"], about["microbatch"]]
    forwards = [e for e in complete(trace) if e["name"].startswith("F")]
    sums = {pid: sum(e["args"]["patches"] for e in forwards if e["pid"] == pid) for pid in range(3)}
    assert sums[0] > 0
    assert sums[2] > 0
    assert sums[1] == 2 * (sums[0] + sums[2])  # both stages hold the samples of all images
    generated = samples["task"].count("TASK_GENERATION")
    assert sum(e["args"]["samples"] for e in forwards if e["pid"] == 2) == generated


def test_the_critical_path_lasts_as_long_as_the_step(trace: Trace, plan: dict[str, Any]) -> None:
    path = [e for e in trace["traceEvents"] if e.get("cat") == "critical"]
    assert {(e["pid"], e["tid"]) for e in path} == {(3, 0)}
    path.sort(key=lambda e: e["ts"])
    assert path[0]["ts"] == 0
    for before, after in pairwise(path):
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert sum(e["dur"] for e in path) == pytest.approx(int(plan["makespan_after_ns"]) / 1e3)


class Page(HTMLParser):
    """Tags, what they refer to, and the text of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in ("td", "th") and data.strip():
            self.cells.append(data)


def test_a_page_holds_tables_and_picture_and_fetches_nothing(
    line: tuple[str | Path, ...], plan: dict[str, Any], tmp_path: Path
) -> None:
    assert run(*line, "--plot", tmp_path / "p.html").returncode == 0
    text = (tmp_path / "p.html").read_text()
    page = Page(text)
    assert page.tags.count("table") == 5 + bool(plan.get("decisions"))
    assert page.tags.count("svg") == 1
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert all(reference.startswith("#") for reference in page.references)
    assert not re.search(r"@import|url\((?!#)", text)
    for key in ("makespan_before_ns", "makespan_after_ns"):
        assert f"{int(plan[key]) / 1e6:.3f}" in page.cells
    assert {"vit", "llm", "dit"} <= set(page.cells)
    assert {candidate["name"] for candidate in plan["candidates"]} <= set(page.cells)
    assert {"best fit, canonical order", "+ balanced packing", "+ order searched"} <= set(page.cells)
    assert plan["job_id"] in text
    ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])


def test_pictures_outline_the_critical_path(
    line: tuple[str | Path, ...], trace: Trace, plan: dict[str, Any], tmp_path: Path
) -> None:
    assert run(*line, "--plot", tmp_path / "p.svg").returncode == 0
    text = (tmp_path / "p.svg").read_text()
    path = sum(e.get("cat") == "critical" for e in trace["traceEvents"])
    outlined = len(re.findall(r'style="fill: none; stroke: #111111', text))
    assert outlined > path  # that of the planned step and that of the step before planning
    bars = len(re.findall(r'style="fill: #[0-9a-f]{6}(?:; [a-z-]*opacity: [0-9.]+)?; stroke: #ffffff', text))
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(JOB))
    planner = open_job(job, DataFlags(tuple(str(part) for part in line[6::2])))
    assert bars == sum(map(len, bars_of(explain(planner.job, planner.plan(1)).before))) + len(complete(trace))
    after = f"{int(plan['makespan_after_ns']) / 1e6:.1f} ms"
    for title in (
        "before: canonical order",
        "after: planned",
        after,
        "+ balanced packing",
        f"+ order searched {after}",
    ):
        assert title in text


def test_a_wide_job_shows_the_ranks_of_the_critical_path(line: tuple[str | Path, ...], tmp_path: Path) -> None:
    """96 nodes; 48 are drawn."""
    modules = [{"name": m, "kind": k, "dp": 16} for m, k in (("e", "encoder"), ("b", "backbone"), ("g", "generator"))]
    modules[1]["pp"] = 4
    file = tmp_path / "wide.yaml"
    job = {"stream": {**JOB["stream"], "global_batch": 32, "seed": 3}}
    job["execution"] = {"modules": modules, "end": {"steps": 1}}
    file.write_text(yaml.safe_dump(job))
    datasets = tuple(str(part) for part in line[6::2])
    planner = open_job(file, DataFlags(datasets))
    summary = explain(planner.job, planner.plan(0))
    summary = replace(summary, before=summary.after, loads_before=summary.loads_after)
    bars = bars_of(summary.after)
    critical = {node for node, found in enumerate(bars) for bar in found if bar.critical}
    assert max(summary.after.nodes[node].rank for node in critical) >= 8, "its first ranks would do"
    text = svg_of_plan(summary)
    outlined = len(re.findall(r'style="fill: none; stroke: #111111', text))
    assert outlined == 2 * sum(bar.critical for found in bars for bar in found)
    assert {labels_of(summary.after)[node] for node in critical} <= set(re.findall(r">([^<]+)</text>", text))
    assert sum(text.count(f">{label}</text>") for label in labels_of(summary.after)) == 2 * 48


@pytest.mark.parametrize("suffix", [".svg", ".html", ".pdf", ".png"])
def test_the_same_plan_gives_the_same_file(line: tuple[str | Path, ...], tmp_path: Path, suffix: str) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        assert run(*line, "--plot", file).returncode == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_bitmap_shows_the_colours_of_all_modules(line: tuple[str | Path, ...], tmp_path: Path) -> None:
    assert run(*line, "--plot", tmp_path / "p.png").returncode == 0
    with Image.open(tmp_path / "p.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    for colour in ((0x44, 0x77, 0xAA), (0xEE, 0x77, 0x33), (0x22, 0x88, 0x33), (0xE8, 0xE8, 0xE8)):
        assert (pixels == colour).all(axis=1).sum() > 1000, colour


def test_files_that_cannot_be_written_are_named(line: tuple[str | Path, ...], tmp_path: Path) -> None:
    assert "bmpx" in refused(*line, "--plot", tmp_path / "p.bmpx")
    for flag, name in (("--plot", "p.html"), ("--plot", "p.png"), ("--trace", "t.json")):
        path = tmp_path / "nowhere" / name
        assert f"{flag} {path} cannot be written (No such file" in refused(*line, flag, path)
    assert f"--trace {tmp_path} cannot be written (Is a directory); " in refused(*line, "--trace", tmp_path)


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_full_disk_leaves_the_files_that_are_there(line: tuple[str | Path, ...], tmp_path: Path) -> None:
    names = {"--plot": ("p.png", "p.svg", "p.pdf", "p.html"), "--trace": ("t.json",)}
    with small_disk(tmp_path / "disk") as disk:
        for name in (name for of_flag in names.values() for name in of_flag):
            (disk / name).write_text("precious")
        fill(disk)
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        for flag, of_flag in names.items():
            for name in of_flag:
                said = refused(*line, flag, disk / name)
                assert said.startswith(
                    f"dataserver: {flag} {disk / name} cannot be written (No space left on device); "
                )
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before
