"""Where `prometheus` and `promtool` are: installed, or out of Debian's package, which needs no root to be unpacked."""

import shutil
import subprocess
from pathlib import Path
from tempfile import mkdtemp

import pytest

FETCH_S = 300


@pytest.fixture(scope="session")
def programs() -> dict[str, str]:
    """The path of each program by its name; skips where there is none and apt has none."""
    names = ("prometheus", "promtool")
    found = {name: path for name in names if (path := shutil.which(name)) is not None}
    if len(found) < len(names):
        folder = _unpacked()
        found = {name: str(folder / "usr/bin" / name) for name in names}
    return found


def _unpacked() -> Path:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip("prometheus is not installed, and there is no apt to fetch Debian's package with")
    folder = Path(mkdtemp(prefix="prometheus-"))
    line = ["apt-get", "download", "prometheus"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=FETCH_S)
    if done.returncode != 0:
        pytest.skip(f"prometheus is not installed, and apt cannot fetch it: {done.stderr.strip()[:200]}")
    (package,) = folder.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "-x", package, folder], check=True, timeout=FETCH_S)
    return folder
