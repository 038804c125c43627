"""Copies of the repository in which mutants live, so that nobody ever meets one in the working tree."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path.cwd()
"""The repository: scripts/mutate goes there."""
PROGRAM = Path(__file__).resolve().parents[1]
"""The folder of this package."""
STORE = ROOT / "build" / "mutants"
"""Copies and records of coverage, ignored by git; may be removed at any time."""
COMPILED = ROOT / "dataserver" / "planning" / "kernels" / "__pycache__"
"""Compiled kernels, told apart by a digest of their sources."""


def tracked_files() -> list[str]:
    """The files of the working tree that git does not ignore, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = sorted(set(os.fsdecode(listed.stdout).split("\0")) - {""})
    return [name for name in names if (ROOT / name).is_file()]


_WARM_UP = "from dataserver.cli.warm import warm_up; warm_up()"


class Tree:
    """One copy of the repository, which mutants are tried in."""

    def __init__(self, name: str) -> None:
        self.folder = STORE / name / "tree"
        names = tracked_files()
        for name in names:
            self._bring(name)
        for path in list(self.folder.rglob("*")):
            if path.is_file() and str(path.relative_to(self.folder)) not in names:
                path.unlink()

        # Else the first tests would wait for the compiler, and be taken for slow ones, or for killed mutants.
        subprocess.run([sys.executable, "-c", _WARM_UP], cwd=self.folder, env=self.environment(), check=True)

    def _bring(self, name: str) -> None:
        copy = self.folder / name
        if not copy.is_file() or copy.read_bytes() != (ROOT / name).read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy)

    def environment(self, **more: str) -> dict[str, str]:
        """Variables for processes that shall import this copy, and leave nothing compiled in it.

        They keep bytecode, also that of the packages that pytest compiles anew in every process: half of its start.
        """
        paths = os.pathsep.join(map(str, (self.folder, self.folder / "protos", PROGRAM)))
        data = os.environ.get("DISTTRAIN_TEST_DATA", str(ROOT.parent / "shared" / "data"))
        return {
            **os.environ,
            "DISTTRAIN_TEST_DATA": data,
            "DISTTRAIN_TEST_EXAMPLES": "100",
            "NUMBA_CACHE_DIR": str(COMPILED),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": paths,
            "PYTHONPYCACHEPREFIX": str(STORE / "bytecode"),
            **more,
        }
