"""`dataserver simulate` on real indexed shards."""

import copy
import io
import json
import re
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.server_process import refused, run
from rich.console import Console
from shards import write_pairs

from dataserver.cli.comparison_table import WORTHWHILE_PERCENT, comparison_table, notes, verdict
from dataserver.cli.jobs import DataFlags, open_job
from dataserver.planning.job.fields import Memory
from dataserver.reporting.alternatives import Alternative
from dataserver.reporting.comparison import compare

EVEN = {"balance": "even"}
JOB: dict[str, Any] = {
    "stream": {
        "datasets": [{"name": "d"}],
        "seq_len": 256,
        "global_batch": 8,
        "sizing": {"max_patches": 256},
        "generation": {"ratio": "0.4", "query_tokens": 8},
    },
    "execution": {
        "modules": [
            {"name": "vit", "kind": "encoder", "dp": 2, **EVEN},
            {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2, "packing": "best_fit", "balance": "none"},
            {"name": "dit", "kind": "generator", **EVEN},
        ],
        "layout": {"kind": "pipelined", "order": "none"},
        "end": {"steps": 4},
    },
}
"""The baseline: whatever is planned is faster."""
GRID = "packing, balance, order"


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_pairs(tmp_path_factory.mktemp("simulate") / "d", 60, 16)
    assert run("index", folder).returncode == 0
    return folder


@pytest.fixture(scope="module")
def found(indexed: Path) -> dict[str, Any]:
    """The comparison of all four steps."""
    return compared(indexed, JOB)


def line(folder: Path, job: dict[str, Any], *more: str | Path) -> tuple[str | Path, ...]:
    """The command, over a job that is written beside the shards."""
    file = folder.parent / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return "simulate", "--job", file, "--dataset", f"d={folder}", *more


def compared(folder: Path, job: dict[str, Any], *more: str) -> dict[str, Any]:
    done = run(*line(folder, job, "--json", *more))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def changed(job: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A job with the lines of a verdict, or of a row's `changes`, written into it."""
    other = copy.deepcopy(job)
    for module in changes.get("modules", ()):
        next(m for m in other["execution"]["modules"] if m["name"] == module["name"]).update(module)
    other["execution"] |= {name: value for name, value in changes.items() if name != "modules"}
    return other


def groups(found: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the rows of each group."""
    names: dict[str, list[str]] = {}
    for row in found["rows"]:
        names.setdefault(row["dimension"], []).append(row["name"])
    return names


def test_the_main_policies_all_with_all_and_others_one_at_a_time(found: dict[str, Any]) -> None:
    names = groups(found)
    grid = product(("balanced", "best_fit"), ("lpt", "even"), ("disttrain", "search", "none"))
    assert sorted(names.pop(GRID)) == sorted(map(", ".join, grid))
    assert names == {
        "balance of vit": ["none", "lpt"],  # one rank of the generator takes all
        "balance of llm": ["lpt"],
        "schedule": ["gpipe", *(f"interleaved, {chunks} chunks" for chunks in (2, 4, 8))],
        "microbatch": ["2", "4"],  # 8 do not divide the batch
        "extra_in_flight": ["0", "1", "2", "4"],
    }
    assert [(r["dimension"], r["name"]) for r in found["rows"] if r["own"]] == [(GRID, "best_fit, even, none")]
    assert found["rows"][0]["own"]


def test_a_row_is_documented_by_its_keys(found: dict[str, Any]) -> None:
    assert set(found) == {
        "job_id", "first_step", "steps", "steps_of_job", "samples", "images", "tokens", "truncated_tokens", "datasets",
        "rows", "ablation", "short_last_step",
    }  # fmt: skip
    about = {"dimension", "name", "own", "changes"}
    figures = {
        "step_ns", "slower_than_own_percent", "lower_bound_ns", "above_bound_percent", "bubble_percent", "imbalance",
        "padding_percent", "in_flight", "microbatches", "fill_percent", "empty_sequences_percent", "planning_ns",
    }  # fmt: skip
    for row in found["rows"]:
        assert set(row) in (about | figures, about | {"refusal"})
    assert not any("refusal" in row for row in found["rows"] if row["dimension"] == GRID)


def test_changes_are_what_to_write_into_the_job(indexed: Path) -> None:
    found = compared(indexed, JOB, "--steps", "1")
    by_name = {(row["dimension"], row["name"]): row for row in found["rows"]}
    assert found["rows"][0]["changes"] == {}
    assert by_name["balance of vit", "lpt"]["changes"] == {"modules": [{"name": "vit", "balance": "lpt"}]}
    # The whole layout: it replaces the job's.
    assert by_name["extra_in_flight", "2"]["changes"] == {
        "layout": {
            "kind": "pipelined",
            "extra_in_flight": 2,
            "order": "none",
        }
    }
    best = by_name[GRID, "balanced, lpt, search"]
    again = compared(indexed, changed(JOB, best["changes"]), "--steps", "1")
    assert (again["rows"][0]["name"], again["rows"][0]["step_ns"]) == (best["name"], best["step_ns"])
    assert by_name["microbatch", "2"]["changes"] == {"microbatch": 2}
    for name in (("schedule", "gpipe"), ("schedule", "interleaved, 4 chunks"), ("microbatch", "2")):
        row = by_name[name]
        assert compared(indexed, changed(JOB, row["changes"]), "--steps", "1")["rows"][0]["step_ns"] == row["step_ns"]


def test_figures_agree_with_the_plans_of_the_same_steps(indexed: Path) -> None:
    """The job's own row is the mean of what `dataserver plan` says of each step."""
    job = {**JOB, "execution": {**JOB["execution"], "layout": {"kind": "pipelined"}}}
    own = compared(indexed, job, "--first-step", "1", "--steps", "2")["rows"][0]
    plans = []
    for step in (1, 2):
        _, *rest = line(indexed, job, "--step", str(step), "--json")
        plans.append(json.loads(run("plan", *rest).stdout))
    makespans = [int(plan["makespan_after_ns"]) for plan in plans]
    assert own["step_ns"] == round(sum(makespans) / 2)
    assert own["lower_bound_ns"] == round(sum(int(plan["lower_bound_ns"]) for plan in plans) / 2)
    assert own["bubble_percent"] == pytest.approx(sum(plan["bubble_after_ppm"] for plan in plans) / 2e4)
    for module, load in enumerate(plans[0]["loads"]):
        times = [[int(ns) for ns in plan["loads"][module]["after_ns"]] for plan in plans]
        expected = sum(max(ns) * len(ns) / sum(ns) for ns in times) / 2
        assert own["imbalance"][load["module"]] == pytest.approx(expected)


def test_what_must_hold_of_any_comparison(found: dict[str, Any]) -> None:
    by_name = {row["name"]: row for row in found["rows"] if row["dimension"] == GRID}
    for name, row in by_name.items():
        assert row["step_ns"] >= row["lower_bound_ns"] > 0
        assert 0 < row["fill_percent"] <= 100
        assert 0 <= row["empty_sequences_percent"] < 100
        assert 0 < row["bubble_percent"] < 100
        assert min(row["imbalance"].values()) >= 1
        assert row["planning_ns"] > 0
        assert row["in_flight"]["llm"] >= 2
        packing, balance, _ = name.split(", ")
        if balance == "lpt":
            assert row["step_ns"] <= by_name[f"{packing}, even, none"]["step_ns"], name
    baseline = by_name["best_fit, even, none"]
    assert baseline["slower_than_own_percent"] == 0
    assert by_name["balanced, lpt, search"]["slower_than_own_percent"] < 0
    slots = 2 * found["steps"] * baseline["microbatches"]
    held = slots * (1 - baseline["empty_sequences_percent"] / 100) * 256 * baseline["fill_percent"] / 100
    assert found["tokens"] == pytest.approx(held, rel=0.05)  # exactly so in one step; these are means over steps


def test_one_step_accounts_for_every_token(indexed: Path) -> None:
    found = compared(indexed, JOB, "--steps", "1")
    for row in found["rows"]:
        slots = 2 * row["microbatches"] * row["changes"].get("microbatch", 1)
        held = slots * (1 - row["empty_sequences_percent"] / 100) * 256 * row["fill_percent"] / 100
        assert found["tokens"] == pytest.approx(held)


def test_only_planning_time_differs_between_two_runs(indexed: Path) -> None:
    first, second = (compared(indexed, JOB, "--steps", "1") for _ in range(2))
    for found in (first, second):
        for row in found["rows"]:
            del row["planning_ns"]
    assert first == second


def test_what_each_change_from_the_baseline_to_the_job_brings(indexed: Path) -> None:
    """A job whose policies are the baseline's has one entry; the defaults have one for each thing that they change."""
    found = compared(indexed, JOB, "--steps", "2")
    (only,) = found["ablation"]
    own = found["rows"][0]["step_ns"]
    assert (only["name"], round(only["step_ns"])) == ("best fit, canonical order", own)
    planned = copy.deepcopy(JOB)
    for module in planned["execution"]["modules"]:
        module.pop("balance")
        module.pop("packing", None)
    planned["execution"]["layout"] = {"kind": "pipelined"}
    done = compared(indexed, planned, "--steps", "2")
    ablation = done["ablation"]
    assert [row["name"] for row in ablation] == [
        "best fit, canonical order",
        "+ balanced packing",
        "+ images spread over ranks",
        "+ sequences spread over ranks",
        "+ order searched",
    ]
    times = [row["step_ns"] for row in ablation]
    assert (round(times[0]), round(times[-1])) == (own, done["rows"][0]["step_ns"])
    assert times[-1] < times[0]
    assert [row["of_the_first"] for row in ablation] == pytest.approx([t / times[0] for t in times])
    assert [row["of_the_one_before"] for row in ablation[1:]] == pytest.approx([b / a for a, b in pairwise(times)])
    by_name = {row["name"]: row["step_ns"] for row in done["rows"]}
    assert round(times[1]) == by_name["balanced, even, none"]
    lines = run(*line(indexed, planned, "--steps", "2")).stdout.splitlines()
    for row in ablation:
        shown = f"{row['step_ns'] / 1e6:.1f} {row['of_the_one_before']:.3f} {row['of_the_first']:.3f}"
        assert sum(" ".join(text.split()) == f"{row['name']} {shown}" for text in lines) == 1


def test_a_job_that_packs_nothing_has_no_choice_of_packing(indexed: Path) -> None:
    job = {**JOB, "stream": {**JOB["stream"], "packing": {"enabled": False}}}
    found = compared(indexed, job, "--steps", "1")
    assert len(groups(found)["balance, order"]) == 2 * 3
    assert "ablation" not in groups(found), "all of it is among them"
    shown = run(*line(indexed, job, "--steps", "1")).stdout
    assert "lpt, search" in shown
    assert "best_fit" not in shown


def test_padding_of_padded_modules(indexed: Path) -> None:
    job = changed(JOB, {"modules": [{"name": "vit", "padded": True}]})
    found = compared(indexed, job, "--steps", "1")
    assert all(set(row["padding_percent"]) == {"vit"} for row in found["rows"])
    assert max(row["padding_percent"]["vit"] for row in found["rows"]) > 0
    assert " pad " in run(*line(indexed, job, "--steps", "1")).stdout


def test_the_table_marks_the_job_and_names_what_is_faster(indexed: Path) -> None:
    done = run(*line(indexed, JOB, "--steps", "2"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    assert "steps 0 to 1 of 4" in lines[1]
    assert [row.split()[:4] for row in lines if row.startswith(" * ")] == [["*", "best_fit,", "even,", "none"]]
    for heading in (GRID, "balance of vit", "schedule", "extra_in_flight"):
        assert sum(row.strip() == heading for row in lines) == 1
    rows = [row.replace("*", " ") for row in lines if row.startswith(" ") and ("balanced, " in row or "_fit, " in row)]
    times = [float(row.split()[3]) for row in rows]
    assert len(times) == 12
    assert times == sorted(times)
    (advice,) = re.findall(r"^Take (.+) \((.+)\): [\d.]+ % less time than the job as it is, with$", done.stdout, re.M)
    assert any(row.strip().startswith(f"{advice[0]} ") for row in lines)


def test_the_lines_of_the_verdict_make_the_job_faster(indexed: Path) -> None:
    found = compared(indexed, JOB, "--steps", "2")
    shown = run(*line(indexed, JOB, "--steps", "2")).stdout
    lines = re.search(r"^execution:\n(?:  .*\n)+", shown, re.MULTILINE)
    assert lines
    best = changed(JOB, yaml.safe_load(lines[0])["execution"])
    (gain,) = re.findall(r"([\d.]+) % less time than the job as it is", shown)
    before, after = (one["rows"][0]["step_ns"] for one in (found, compared(indexed, best, "--steps", "2")))
    assert 100 * (before - after) / before == pytest.approx(float(gain), abs=0.06)


def test_more_microbatches_in_flight_are_advised_apart_unless_memory_is_stated(indexed: Path) -> None:
    job = changed(JOB, {"layout": {"kind": "pipelined", "order": "search", "extra_in_flight": 0}})
    found = compared(indexed, job, "--steps", "2")
    own, extra = found["rows"][0], [row for row in found["rows"] if row["dimension"] == "extra_in_flight"]
    assert all(row["in_flight"]["llm"] > own["in_flight"]["llm"] for row in extra)
    shown = run(*line(indexed, job, "--steps", "2")).stdout
    alike = [row for row in found["rows"] if "refusal" not in row and row["changes"].get("microbatch", 1) == 1]
    no_more = [row for row in alike if all(n <= own["in_flight"][m] for m, n in row["in_flight"].items())]
    first, _, second = shown[shown.index("Take ") :].partition("If there is memory for more sequences")
    gain = re.search(r"(\S+) % less time than the job as it is", first)
    assert gain is not None
    assert gain[1] in {f"{-row['slower_than_own_percent']:.1f}" for row in no_more}
    assert float(gain[1]) >= -min(row["slower_than_own_percent"] for row in no_more) - WORTHWHILE_PERCENT - 0.1
    assert not second or re.match(r" in the fullest stage \((\w+ \S+, now \S+)(, \w+ \S+, now \S+)*\),\ntake ", second)


def test_what_cannot_be_planned_is_a_row_that_says_why(indexed: Path) -> None:
    *_, file, _, dataset = line(indexed, JOB)
    planner = open_job(Path(file), DataFlags((str(dataset),)))
    own = Alternative("memory", "endless", planner.job.spec.execution)
    small = tuple(
        m.model_copy(update={"memory": Memory(budget_bytes=3, unit_bytes=1)} if m.name == "llm" else {})
        for m in own.execution.modules
    )
    tiny = Alternative("memory", "three tokens", own.execution.model_copy(update={"modules": small}))
    possible, impossible = compare(planner, [own, tiny], [0, 1], lambda *_: None)
    assert possible.figures is not None
    assert impossible.figures is None
    (note,) = notes([possible, impossible])
    assert note.startswith("memory three tokens: not possible, step 0: ")
    assert impossible.refusal in note
    assert "tokens" in impossible.refusal
    console = Console(file=io.StringIO(), width=110)
    console.print(comparison_table([possible, impossible]))
    row = next(row for row in console.file.getvalue().splitlines() if "three tokens" in row)  # type: ignore[attr-defined]
    assert set(row.split()[2:]) == {"-"}
    assert "the job's own policies are the fastest" in verdict([possible, impossible])
    with pytest.raises(ValueError, match="tokens"):
        compare(planner, [tiny, own], [0], lambda *_: None)


def test_steps_end_where_the_job_ends(indexed: Path) -> None:
    found = compared(indexed, JOB, "--first-step", "3")
    assert (found["first_step"], found["steps"], found["steps_of_job"]) == (3, 1, 4)


def test_a_short_last_step_is_no_part_of_the_means(indexed: Path) -> None:
    """An epoch of 60 pairs ends in the middle of a step."""
    job = copy.deepcopy(JOB)
    job["execution"]["end"] = {"epochs": 1}
    whole = compared(indexed, job, "--steps", "1000")
    last = whole["steps_of_job"] - 1
    short = whole["short_last_step"]
    assert (short["step"], whole["steps"]) == (last, last)
    assert 0 < short["tokens"] < 0.9 * whole["tokens"] / last
    before, alone = (compared(indexed, job, *steps) for steps in (("--steps", str(last)), ("--first-step", str(last))))
    assert before["short_last_step"] is alone["short_last_step"] is None
    assert before["rows"][0]["step_ns"] == whole["rows"][0]["step_ns"]
    assert before["tokens"] == whole["tokens"]
    assert short["step_ns"] == short["baseline_ns"] == alone["rows"][0]["step_ns"]
    text = f"the last step, {last}, holds {short['samples']} samples and is no part of the means: "
    assert text + f"{short['step_ns'] / 1e6:.1f} ms, 1.000 of the baseline's" in run(*line(indexed, job)).stdout


def test_refusals(indexed: Path) -> None:
    assert "ends after step 3" in refused(*line(indexed, JOB, "--first-step", "4"))
    assert "--steps is 0" in refused(*line(indexed, JOB, "--steps", "0"))
    assert "--first-step is -1" in refused(*line(indexed, JOB, "--first-step=-1"))
    assert "'d'" in refused("simulate", "--job", line(indexed, JOB)[2], "--dataset", f"other={indexed}")
    assert "cannot be read" in refused("simulate", "--job", indexed / "no.yaml", "--dataset", f"d={indexed}")


def test_help() -> None:
    assert "--first-step" in run("simulate", "--help").stdout
