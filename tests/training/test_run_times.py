"""Where the time of whole runs went, and what they say would help."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.forked import run_forked
from cli.server_process import serving
from faults.relay import Mode, Relay
from program.conftest import Fleet
from program.runtime_cases import Degrees, job_data
from training.runs import TIMEOUT_S, Run, read_until, variables

ALONE = Degrees(1, 1, 1, 1, colocated=True)
TWO = Degrees(2, 2, 1, 2, colocated=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]


def run(address: str, folder: Path, degrees: Degrees, steps: int, *options: str, **sleeps: float) -> tuple[str, Any]:
    """Train with an encoder that sleeps; what it said on stderr, and the last line of its metrics."""
    own = {"use": "training.sleepy:SleepyEncoder", "options": {"hidden": 8, **sleeps}}
    files = {
        "job.yaml": job_data(degrees, end={"steps": 1000}, generation={"ratio": "0.5" if degrees.generator else "0"}),
        "train.yaml": {"modules": {"vit": own}},
    }
    for name, content in files.items():
        (folder / name).write_text(yaml.safe_dump(content))
    words = ["trainclient", "train", "--job", "job.yaml", "--config", "train.yaml", "--servers", address]
    words += ["--metrics", "metrics.jsonl", "--threads", "1", "--steps", str(steps), *options]
    done = run_forked(words, folder, variables(), TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stderr, json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["run_times"]


def test_a_slow_rank_is_named(fleet: Fleet, tmp_path: Path) -> None:
    said, times = run(fleet.address, tmp_path, TWO, 5, us_per_patch=1500, factor=4, slow_rank=1)
    assert "Where the time of 5 steps went: " in said
    assert re.search(r"^1\. \d+%: global rank 1 \(vit \+ llm \+ dit rank 1\) on \S+ computes \d\.\d times", said, re.M)
    assert (times["first_step"], times["steps"], times["processes"]) == (0, 5, 2)
    assert times["modules"]["vit + llm + dit"]["rows_s"].keys() == {"vit", "llm", "dit"}
    assert times["all"]["computed_s"] > 0
    assert times["remedies"][0]["saves"] > 0.1


@pytest.mark.long
def test_a_run_with_nothing_wrong_says_so(fleet: Fleet, tmp_path: Path) -> None:
    said, times = run(fleet.address, tmp_path, ALONE, 8, us_per_patch=1000)
    assert "Nothing to mend: " in said
    assert times["remedies"] == []


@pytest.mark.long
def test_servers_that_are_too_slow_are_to_be_more(fleet: Fleet, tmp_path: Path) -> None:
    options = ("--no-direct", "--no-shared-memory")
    with serving("--dataset", f"pairs={fleet.folders['pairs']}", *options) as server:
        relay = Relay(server.address)
        relay.set(Mode.PASS, delay_s=1.0)
        said, times = run(relay.address, tmp_path, ALONE, 10, us_per_patch=10)
        relay.close()
    assert re.search(r"^1\. \d+%: ranks waited for data in \d+ of 9 steps", said, re.M), said
    assert f"dataserver top {relay.address}" in times["remedies"][0]["command"]


@pytest.mark.long
def test_a_run_that_is_stopped_and_resumed_tells_the_times_of_each_part(fleet: Fleet, tmp_path: Path) -> None:
    whole = Run(fleet.address, tmp_path)
    process = whole.start(whole.command(Degrees(1, 1, 1, 1, frozen=("vit",))))
    read_until(process, "step 5/")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM, errors
    done = len(whole.metrics())
    assert f"Where the time of {done} steps went: " in errors
    code, errors = whole.train(Degrees(1, 1, 1, 1, frozen=("vit",)), "--steps", str(done + 4))
    assert code == 0, errors
    assert "Where the time of 4 steps went: " in errors
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [(n, line["run_times"]) for n, line in enumerate(lines) if "run_times" in line]
    assert [(n, t["first_step"], t["steps"]) for n, t in times] == [(done, 0, done), (done + 5, done, 4)]
    assert times[0][1]["modules"].keys() == {"vit", "llm", "dit"}
    assert [line["step"] for line in lines if "step" in line] == list(range(done + 4))
