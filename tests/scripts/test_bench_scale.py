"""The benchmark of very many shards runs with few: what it makes can be indexed, served, measured and sought in."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench_scale.py"


@pytest.mark.long
def test_it_runs_with_few_shards(tmp_path: Path) -> None:
    sizes = ["--shards", "60", "--samples", "300", "--distinct", "10", "--seeks", "1"]
    ran = subprocess.run(
        [sys.executable, BENCH, *sizes, "--folder", tmp_path], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode in (0, 1), ran.stderr  # 1 where it misses a time
    assert "job creation on the first server" in ran.stdout, ran.stderr
    assert "memory (PSS)" in ran.stdout
    names = sorted(p.name for p in (tmp_path / "shards").glob("disttrain.*"))
    assert [name.split("-")[0] for name in names] == [
        "disttrain.duplicates",
        "disttrain.flags",
        "disttrain.sets",
        "disttrain.statistics",
        "disttrain.summary",
    ]
    assert len(list((tmp_path / "shards").glob("*.tar"))) == 60
    assert len({p.stat().st_ino for p in (tmp_path / "shards").glob("*.index")}) == 10
