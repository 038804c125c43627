"""What the demo shows while it waits."""

import io

import pytest
from demo_parts.progress import EVERY_S, LineDisplay, LiveDisplay
from rich.console import Console


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("demo_parts.progress.time.monotonic", found)
    return found


def test_lines_say_again_what_is_waited_for(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    shown = LineDisplay()
    shown.begin("plan", "loading the planner")
    shown.tick()
    clock.now += EVERY_S
    shown.tick()
    shown.tick()
    shown.say("planning step 3 of 20")
    clock.now += EVERY_S
    shown.tick()
    shown.done("all planned")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "plan: loading the planner",
        "plan: loading the planner (3 s)",
        "plan: planning step 3 of 20 (6 s)",
        "plan: all planned",
    ]


def test_the_table_has_every_stage_and_a_bar_while_one_counts(clock: Clock) -> None:
    shown = LiveDisplay(("index", "plan", "training"))

    def drawn() -> list[str]:
        console = Console(file=io.StringIO(), width=100)
        console.print(shown)
        assert isinstance(console.file, io.StringIO)
        return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]

    shown.begin("index", "reading [sizes]")
    clock.now += 2
    shown.done("600 samples [all]")
    clock.now += 1
    shown.begin("plan", "planning step 3 of 20")
    clock.now += 7
    index, plan, training = drawn()
    assert index == "+ index 600 samples [all] 2 s"
    assert plan.startswith(("- plan ━", "| plan ━", "/ plan ━", "\\ plan ━"))
    assert plan.endswith("planning step 3 of 20 7 s")
    assert training == "training"
