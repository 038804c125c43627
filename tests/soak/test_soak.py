"""A short soak, and what its report says of figures that are not flat."""

import json
from pathlib import Path

import pytest
from benchmarks.range_server import State
from serving.harness import index
from shards import write_pairs
from soak.report import MANY, SPARE_MIB, Report, Usage, write_report
from soak.soaking import behind_a_relay, bytes_of, soak
from stores import no_stores, stores

__all__ = ["no_stores", "stores"]


SEED = 2389
"""Its second fault freezes the store for longer than a request waits. Its first twenty end no server: a new process
takes seconds to begin, and `tests/faults/test_schedules.py` ends many."""
FAULTS = 6
MICROBATCHES = 31
DEADLINE_S = 420
"""Half a minute is enough on a machine that does nothing else."""


def from_blocks(report: Report) -> int:
    """Bytes of images that were read in no store."""
    return sum(report.image_bytes.values()) - report.image_bytes["the store"]


def was_enough(report: Report) -> bool:
    """Whether a soak met faults and read from stores and blocks, however long that took."""
    return (
        report.microbatches >= MICROBATCHES
        and sum(report.faults.values()) >= FAULTS
        and report.faults.get("store frozen", 0) >= 1
        and report.image_bytes["the store"] > 0
        and from_blocks(report) > 0
    )


@pytest.mark.long
@pytest.mark.timeout(2 * DEADLINE_S)
def test_a_few_faults_leave_every_digest(stores: tuple[State, str], tmp_path: Path) -> None:
    state, address = stores
    local = index(write_pairs(tmp_path / "local", 60, 20, seed=1, median_size=120))
    remote = write_pairs(tmp_path / "remote", 60, 5, seed=2, median_size=120)
    state.put_folder("/bucket/laion", remote)
    report = Report(seconds=DEADLINE_S, seed=SEED, stall_s=DEADLINE_S / 2)
    with behind_a_relay(address) as store:
        folders = {"local": local, "s3": index(Path("s3://bucket/laion"))}
        soak(folders, bytes_of(remote), tmp_path, store, report, pause_s=2.5, servers=2, enough=was_enough)
    assert report.problems() == [], report.text()
    assert was_enough(report), report.text()


def usages(*rss_mib: float) -> list[Usage]:
    return [Usage(at, rss, 10, 10) for at, rss in enumerate(rss_mib)]


def test_a_report_names_what_grows_and_what_is_wrong(tmp_path: Path) -> None:
    flat = Report(1, 0, server=usages(50, 90, 100, 100, 101, 100), readers=usages(*[10] * 6))
    assert flat.problems() == []
    grown = Report(1, 0, server=usages(50, 90, 100, 100, 140, 101 + SPARE_MIB * 2), readers=usages(*[10] * 6))
    assert [problem.split(":")[0] for problem in grown.problems()] == ["server"]
    wrong = Report(1, 0, wrong=["('vit', 0) ended"], stalls=2, server=usages(*[1] * 6), readers=usages(*[1] * 6))
    assert wrong.problems() == ["('vit', 0) ended", "2 stalls"]
    assert "Verdict: ('vit', 0) ended; 2 stalls." in wrong.text()
    unused = Report(1, 0, microbatches=MANY, image_bytes={"memory": 1, "disks": 0})
    assert unused.problems() == ["no byte came from disks"]
    early = Report(1, 0, wrong=["('vit', 0) ended"], server=usages(50, 51))
    assert early.problems() == ["('vit', 0) ended"]
    assert "too few looks" in early.text()
    written = Report(60, 5, faults={"kill": 2}, server=usages(*[1] * 6), readers=usages(*[1] * 6))
    write_report(written, tmp_path / "r.md")
    assert "scripts/soak --minutes 1 --seed 5" in (tmp_path / "r.md").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["faults"] == {"kill": 2}
