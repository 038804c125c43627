"""CPU time of a server and of all that it starts: nothing is left out, and nothing counts twice."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from transforms.packages import write_package

from dataserver.planning.job.fields import InstalledPixels
from dataserver.serving import cpu_time
from dataserver.serving.cpu_time import cpu_seconds
from dataserver.serving.metrics import Stage, usage_of
from dataserver.transforms import TransformPool

BUSY_S = 0.3
BUSY = f"import time\nwhile time.process_time() < {BUSY_S}: pass\n"
STARTS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True); {BUSY}"


def by_others(before: float, own_before: float) -> float:
    """What other processes than this one have used meanwhile."""
    return cpu_seconds() - before - (time.process_time() - own_before)


def test_what_runs_and_what_has_ended_count_once() -> None:
    """A process that works, after one that it started, waited for, and that worked as long."""
    before, own = cpu_seconds(), time.process_time()
    talks = f"{STARTS}\nprint('done', flush=True); sys.stdin.read()"
    line = [sys.executable, "-c", talks, BUSY]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        while_it_runs = by_others(before, own)
        process.communicate("")
    after = by_others(before, own)
    assert 2 * BUSY_S - 0.05 < while_it_runs < 2 * BUSY_S + 0.5
    assert while_it_runs - 0.05 < after < while_it_runs + 0.2


def test_a_process_that_ends_while_it_is_looked_up_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        process.wait()
    monkeypatch.setattr(cpu_time, "children_of", lambda pid: [process.pid] if pid == os.getpid() else [])
    before, own = cpu_seconds(), time.process_time()
    assert by_others(before, own) == pytest.approx(0, abs=0.05)


def test_a_transform_of_users_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"""
        import time

        def busy(pixels, words, options):
            end = time.process_time() + {BUSY_S}
            while time.process_time() < end:
                pass
            return pixels
    """
    write_package(
        tmp_path, "works", "1.0", "disttrain_test_works", code, {"pixels": {"busy": "disttrain_test_works:busy"}}
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = TransformPool.of({"busy": "1.0"})
    waited = dict.fromkeys(Stage, 0.0)
    before, own = usage_of(0, waited).cpu_s, time.process_time()
    wanted = InstalledPixels(kind="installed", name="busy", version="1.0")
    pool.pixels(np.zeros((4, 4, 3), np.uint8), wanted, (1, 2, 3, 4))
    found = []
    for end in (lambda: None, pool.close):
        end()
        found.append(usage_of(0, waited).cpu_s - before - (time.process_time() - own))
    assert BUSY_S - 0.05 < found[0] < found[1] + 0.05
