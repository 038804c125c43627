"""What benchmarks share."""

import pytest
from benchmarks import calibration
from benchmarks.rows import Row, report


class Clock:
    """CPU time that passes by the same amount whenever it is read."""

    def __init__(self, step_ns: int) -> None:
        self.now = 0
        self.step_ns = step_ns

    def __call__(self) -> int:
        self.now += self.step_ns
        return self.now


@pytest.mark.parametrize("slower", [1, 3])
def test_a_slower_machine_gives_the_same_verdict(slower, monkeypatch):
    clock = Clock(slower * 1_600_000)
    monkeypatch.setattr(calibration.time, "thread_time_ns", clock)

    def run() -> str:
        clock.now += slower * 16_000_000
        return "done"

    result, reference_ms = calibration.timed(run)
    once = (1.6 / 5 + 1 + 1) / 3  # each loop takes 1.6 ms by this clock where the machine is not slower
    assert (result, reference_ms) == ("done", pytest.approx(17.6 / once))
    assert calibration.slowdown() == pytest.approx(slower * once)


def test_the_least_of_several_calls_counts(monkeypatch):
    clock = Clock(1_600_000)
    monkeypatch.setattr(calibration.time, "thread_time_ns", clock)
    spent = iter([9_000_000, 2_000_000, 5_000_000])

    def run() -> None:
        clock.now += next(spent)

    assert calibration.timed(run, repeat=3)[1] == pytest.approx(3.6 / calibration.slowdown())


@pytest.mark.parametrize(("reached", "code"), [(True, 0), (None, 0), (False, 1)])
def test_a_missed_row_is_named_and_ends_with_1(reached, code, capsys):
    rows = [Row("fine", "1 ms", "2 ms", True), Row("the row", "3 ms", "2 ms", reached)]
    assert report(rows) == code
    printed = capsys.readouterr().out
    assert ("missed: ['the row']" in printed) == (code == 1)
    assert "reached" in printed
