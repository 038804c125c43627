"""Cores that a process may keep busy, as control groups limit them."""

import os
from pathlib import Path

import pytest

from dataserver.dataset.machine.cores import usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def written(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, errors="surrogateescape")
    return root


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        ("0::/pods/one\n", {"cpu.max": "max 100000", "pods/cpu.max": "400000 100000", "pods/one/cpu.max": "max 1"}, 4),
        ("0::/not/seen/here\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "no number\n"}, 8),
        ("0::/\n", {"cpu.max": "100000 0\n"}, 8),
        ("0::/a:b\n\nodd\n", {"a:b/cpu.max": "200000 100000\n"}, 2),
        ("0::/a\x0c\u2028\udcff\n", {"cpu.max": "200000 100000\n"}, 2),
        (
            "4:cpuacct,cpu:/kubepods/pod\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "50000\n"},
            3,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ("4:cpuset:/x\n", {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_the_least_of_all_limits_counts(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    own = written(tmp_path, {"membership": membership}) / "membership"
    assert usable_cores(written(tmp_path / "cgroup", files) if files else tmp_path / "none", own) == expected


def test_without_control_groups_all_cores_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == 8
