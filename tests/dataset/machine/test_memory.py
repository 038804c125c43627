"""Memory that a process may use, as control groups limit it."""

import os
from pathlib import Path

import pytest

from dataserver.dataset.machine.memory import Memory, processes_within, usable_memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1 << 18, "SC_PAGE_SIZE": 1 << 12}.__getitem__)


def written(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {}, 1024),
        ("0::/\n", {"memory.max": "max\n"}, 1024),
        ("0::/\n", {"memory.max": f"{300 * MIB}\n"}, 300),
        ("0::/\n", {"memory.max": f"{300 * MIB}\n", "memory.high": f"{200 * MIB}\n"}, 200),
        ("0::/\n", {"memory.high": f"{200 * MIB}\n"}, 200),
        ("0::/\n", {"memory.max": f"{4096 * MIB}\n"}, 1024),
        ("0::/\n", {"memory.max": "no number\n"}, 1024),
        ("0::/\n", {"memory.max": "\n"}, 1024),
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": f"{64 * MIB}", "a/b/memory.max": f"{128 * MIB}"}, 64),
        ("0::/not/seen/here\n", {"memory.max": f"{100 * MIB}\n"}, 100),
        ("7:memory:/docker/x\n0::/\n", {"memory/memory.limit_in_bytes": f"{90 * MIB}\n"}, 90),
        (
            "7:hugetlb,memory:/a/b\n",
            {"memory/memory.limit_in_bytes": f"{1 << 62}\n", "memory/a/memory.limit_in_bytes": f"{80 * MIB}\n"},
            80,
        ),
        ("7:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 1024),
        ("7:cpu:/\n", {"memory/memory.limit_in_bytes": "1\n"}, 1024),
    ],
)
def test_the_least_of_all_limits_counts(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    own = written(tmp_path, {"membership": membership}) / "membership"
    found = usable_memory(written(tmp_path / "cgroup", files), own)
    assert found.num_bytes == expected * MIB
    assert ("control group" in found.whose) == (expected < 1024)


def test_processes_beside_this_one() -> None:
    found = [processes_within(100, Memory(num_bytes, "")) for num_bytes in (0, 100, 299, 300, 1000)]
    assert found == [1, 1, 1, 2, 9]
