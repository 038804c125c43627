"""What would have saved time, of runs whose losses are known."""

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainclient.run_times.remedies import LEAST_STEPS_OF_BURSTS, RunFacts, remedies, slow_factors
from trainclient.run_times.report import RunReport
from trainclient.run_times.spent import Part, ProcessTimes
from trainclient.training.config import TrainConfig

REFERENCE = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
SECOND = 10**9
STEPS = 30


def process(holds: str, rank: int = 0, host: str = "a", tokens: int = 100, **spent: float) -> ProcessTimes:
    """Seconds by part, or by the module whose rows were waited for; the rest of 100 s is what it updated."""
    named = {part.name.lower(): part for part in Part}
    parts = Counter({named[name]: round(s * SECOND) for name, s in spent.items() if name in named})
    rows = Counter({name: round(s * SECOND) for name, s in spent.items() if name not in named})
    parts[Part.UPDATE] += 100 * SECOND - parts.total() - rows.total()
    return ProcessTimes(f"{holds} rank {rank}", holds, 0, host, STEPS, None, tokens, parts, rows)


def facts(*processes: ProcessTimes, waits_s: float | list[float] = 0.0, **fields: Any) -> RunFacts:
    waits = waits_s if isinstance(waits_s, list) else [waits_s] * STEPS
    config = TrainConfig.model_validate(
        {"job": Path("job.yaml"), "servers": "cpu1:1,cpu2:1", **fields.pop("config", {})}
    )
    defaults = {
        "first": 0,
        "end": STEPS + 1,
        "step_s": 100.0,
        "planned_ns": (),
        "num_servers": 2,
        "server": "cpu2:1",
        "zero3": (),
    }
    return RunFacts(config=config, processes=processes, waits_s=waits, **{**defaults, **fields})


def told(run: RunFacts) -> list[tuple[int, str, str]]:
    return [(round(100 * r.saves), r.text, r.command) for r in remedies(run)]


def test_nothing_is_named_where_all_compute() -> None:
    fine = facts(process("vit", computed=97), process("llm", computed=97, vit=1))
    assert told(fine) == []
    assert "Nothing to mend: no known remedy would save 3%" in RunReport.of(fine).text()


def test_waits_for_data_say_how_many_servers_keep_up() -> None:
    found = told(facts(process("vit", computed=48, data=50), waits_s=50 / STEPS))
    assert [(saves, text.partition(" Servers ")[2]) for saves, text, _ in found] == [
        (50, "that keep up need 2.0 times the throughput: about 4 like the 2 of --servers, or as many times the cores")
    ]
    assert found[0][2].startswith("dataserver top cpu1:1,cpu2:1  # ")
    beside = facts(process("vit", computed=48, data=50), process("llm", computed=99), waits_s=50 / STEPS)
    assert told(beside) == [], "whoever waited for nothing would take as long"


def test_waits_in_bursts_are_for_prefetching() -> None:
    waits = [0.0] * (LEAST_STEPS_OF_BURSTS - 1) + [20.0]
    ((saves, text, command),) = told(facts(process("vit", computed=78, data=20), waits_s=waits))
    assert (saves, text.partition(",")[0]) == (
        20,
        "ranks waited for data in bursts: 2 of 20 steps have 100% of the wait",
    )
    assert "--prefetch-bytes" in command


def test_a_slow_rank_is_one_that_others_wait_for() -> None:
    quick, slow = process("vit", 0, computed=45, collectives=50), process("vit", 1, "b", computed=90, collectives=5)
    (first, *rest) = told(facts(quick, slow))
    assert first[0] == 45
    assert first[1].startswith("global rank 1 (vit rank 1) on b computes 2.0 times as long as its peers for the same")
    assert [text[:16] for _, text, _ in rest] == ["gathers and sums"]
    more_work = process("vit", 1, "b", tokens=200, computed=90, collectives=5)
    assert slow_factors([quick, more_work]) == pytest.approx({0: 1.0, 1: 1.0})
    beside = [process("vit", 0, computed=10, llm=85), process("vit", 1, computed=20, llm=75)]
    found = told(facts(*beside, process("llm", computed=99, vit=1)))
    assert [text[:14] for _, text, _ in found] == ["devices waited"], "the backbone hardly waits for the slow encoder"


def test_a_slow_machine_is_named_as_one() -> None:
    quick = [process("vit", rank, f"host {rank // 2}", computed=40, collectives=55) for rank in range(4)]
    slow = [process("vit", rank, "host 2", computed=80, collectives=15) for rank in (4, 5)]
    text = told(facts(*quick, *slow))[0][1]
    assert text.startswith("all 2 processes on host 2 compute longer than their peers elsewhere, up to 2.0 times")


def test_costs_are_doubted_before_degrees_and_policies() -> None:
    uneven = process("vit", computed=10, llm=85), process("llm", computed=90, vit=5)
    assert told(facts(*uneven))[0][:2] == (
        45,
        "devices waited for each other's rows; they computed: llm 90%, vit 10% of the time. Give llm more of the "
        "devices and vit fewer, or another layout",
    )
    right = told(facts(*uneven, planned_ns=(SECOND, 9 * SECOND)))
    assert [command.split()[1] for _, _, command in right] == ["orchestrate"]
    ((_, text, command),) = told(facts(*uneven, planned_ns=(SECOND, SECOND)))
    assert "wrong costs: llm computes 3 times, vit computes 0.333 times as long as the job says" in text
    assert command == "dataserver fit --job job.yaml --server cpu2:1 --config SERVER.yaml"
    even = process("vit", computed=60, llm=35), process("llm", computed=60, vit=35)
    ((saves, _, command),) = told(facts(*even))
    assert (saves, command.split()[1]) == (35, "simulate")


def test_a_process_alone_waits_for_no_other() -> None:
    assert told(facts(process("vit + llm", computed=60, vit=30))) == []


def test_collectives_that_are_slow_by_themselves() -> None:
    both = [process("llm", rank, computed=60, collectives=35) for rank in range(2)]
    ((saves, _, command),) = told(facts(*both))
    assert (saves, command.split()[0]) == (35, "NCCL_DEBUG=INFO")
    assert (
        told(facts(*both, zero3=("llm",)))[0][2]
        == "trainclient train ... --config TRAIN.yaml  # with sharding: zero2 of llm"
    )


def test_what_is_done_between_steps_is_done_less_often() -> None:
    one = process("llm", computed=40, checkpoints=30, evaluation=28)
    config = {"checkpoint": {"every": 5}, "evaluation": {"every": 7}}
    assert [(saves, command) for saves, _, command in told(facts(one, config=config))] == [
        (15, "trainclient train ... --checkpoint.every 10"),
        (14, "trainclient train ... --evaluation.every 14"),
    ]
    config = {"checkpoint": {"every": 5, "asynchronous": False}, "evaluation": {"every": 30}}
    assert [(saves, command) for saves, _, command in told(facts(one, config=config))] == [
        (30, "trainclient train ... --checkpoint.asynchronous")
    ]
    assert told(facts(one, config={"checkpoint": {"every": 100}})) == [], "only the last one, which every run saves"


def test_three_remedies_at_most_and_none_after_too_few_steps() -> None:
    one = process("llm", computed=20, data=20, checkpoints=30, evaluation=28)
    config = {"checkpoint": {"every": 5}, "evaluation": {"every": 5}}
    run = facts(one, process("llm", 1, computed=10, data=20, collectives=40), waits_s=0.6, config=config)
    found = remedies(run)
    assert len(found) == 3
    assert [r.saves for r in found] == sorted((r.saves for r in found), reverse=True)
    few = facts(one, waits_s=[5.0, 5.0], first=4, end=7)
    assert remedies(few) == []
    assert "Remedies need more than 3 steps." in RunReport.of(few).text()


def test_commands_are_those_that_there_are(tmp_path: Path) -> None:
    """The reference, which is made of the commands themselves, has each flag."""
    shown: dict[str, Any] = {"tls_ca": tmp_path / "it's.pem", "token_file": tmp_path / "token", "job": Path("a b.yaml")}
    vit, llm = process("vit", computed=10, llm=85), process("llm", computed=90, vit=5)
    quick, slow = process("vit", 0, computed=45, collectives=50), process("vit", 1, "b", computed=90, collectives=5)
    stalled = {**shown, "checkpoint": {"every": 5, "asynchronous": False}, "evaluation": {"every": 5}}
    bursts = [0.0] * (LEAST_STEPS_OF_BURSTS - 1) + [20.0]
    runs = (
        facts(process("vit", computed=48, data=50), waits_s=50 / STEPS, config=shown),
        facts(process("vit", computed=78, data=20), waits_s=bursts, config=shown),
        facts(quick, slow, config=shown),
        facts(vit, llm, config=shown),
        facts(vit, llm, config=shown, planned_ns=(SECOND, SECOND)),
        facts(process("vit", computed=60, llm=35), process("llm", computed=60, vit=35), config=shown),
        facts(process("llm", computed=40, checkpoints=30, evaluation=28), config=stalled),
        facts(*[process("llm", rank, computed=60, collectives=35) for rank in range(2)], config=shown, zero3=("llm",)),
    )
    commands = {remedy.command for run in runs for remedy in remedies(run)}
    assert len(commands) >= 10
    for command in commands:
        program, name, *words = shlex.split(command, comments=True)
        if program.startswith("NCCL_DEBUG"):
            continue
        section = REFERENCE.partition(f"\n## {program} {name}\n")[2].partition("\n## ")[0]
        options = {*re.findall(r"`--([a-z0-9.-]+)", section), *re.findall(r"--(config) FILE.yaml gives", section)}
        assert len(options) > 3, command
        given = [word.removeprefix("--") for word in words if word.startswith("--")]
        assert set(given) <= options, command
        if "--job" in words:
            assert words[words.index("--job") + 1] == "a b.yaml"
        if name in ("top", "fit"):
            assert words[words.index("--tls-ca") + 1] == str(tmp_path / "it's.pem")


def test_the_table_and_its_json() -> None:
    run = facts(process("vit", computed=10, llm=85, start=2), process("llm", computed=90, vit=5))
    report = RunReport.of(run)
    assert report.text().splitlines()[:6] == [
        "Where the time of 31 steps went: 100.0 s of each of 2 processes",
        "                        seconds     all     vit     llm",
        "computed                   50.0   50.0%   10.0%   90.0%",
        "waited for rows of llm     42.5   42.5%   85.0%    0.0%",
        "waited for rows of vit      2.5    2.5%    0.0%    5.0%",
        "updated parameters          4.0    4.0%    3.0%    5.0%",
    ]
    found = report.as_dict()
    assert (found["steps"], found["processes"], found["seconds"]) == (31, 2, 100.0)
    assert found["modules"]["vit"]["rows_s"] == {"llm": 85.0}
    spent = {name: s for name, s in found["all"].items() if name != "rows_s"}
    assert sum(spent.values()) + sum(found["all"]["rows_s"].values()) == pytest.approx(found["seconds"])
    assert found["remedies"][0]["command"].startswith("trainclient orchestrate --gpus 2")
