"""A container's server compiles nothing: another user, a read-only file system, kernels that the image brought."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cli.server_process import command
from deploy.manifests import ROOT
from serving.harness import index, job_data
from shards import write_pairs

from dataserver.cli.warm import compile_missing
from dataserver.jobs import Catalog, fill_job
from dataserver.planning.job.identity import parse_job
from dataserver.planning.kernels import cache
from dataserver.serving.config import load_config
from trainclient.client import DataClient

TIMEOUT_S = 600
OTHER_UID = 65532
VOLUME = "/mnt"
"""In a namespace of its own. Whether a folder can be written is asked without rights to read everything, so that it may
not lie in a folder of the tests."""
NAMESPACE = ("unshare", "--mount", "--propagation", "private")
SERVE = f"""
set -eu
mount -t tmpfs -o mode=0777 tmpfs {VOLUME}
mount -o remount,bind,ro /
if touch "$KERNELS/x" 2>/dev/null; then echo "the file system can be written to" >&2; exit 1; fi
exec setpriv --reuid {OTHER_UID} --regid {OTHER_UID} --clear-groups --inh-caps=+dac_read_search \\
    --ambient-caps=+dac_read_search timeout -s TERM 60 "$@"
"""
"""The test's own packages may lie in a home that others cannot enter, so that the server may read everything. It can
write to nothing but an empty volume to which everybody may write, as Kubernetes' are."""


def may_mount() -> str:
    """Why a namespace with mounts of its own cannot be had; empty where it can."""
    if os.geteuid() != 0:
        return "another user's process needs root"
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False).stderr


pytestmark = pytest.mark.skipif(bool(may_mount()), reason=may_mount() or "can be had")


def start(kernels: Path, folder: Path, **variables: str) -> str:
    """What a server logs until it is ended, after a stream of it was read to its end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG")}
    environment |= {"KERNELS": str(kernels), "NUMBA_CACHE_DIR": str(kernels), "HOME": f"{VOLUME}/home"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **variables}
    server = command(
        "serve", "--listen", "127.0.0.1:0", "--dataset", f"d={folder}", "--cache-dir", f"{VOLUME}/disttrain"
    )
    process = subprocess.Popen(
        [*NAMESPACE, "sh", "-c", SERVE, "sh", *server],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        num_read = read(line.split()[-1], folder) if line.startswith("listening on ") else 0
        process.terminate()
        _, said = process.communicate(timeout=TIMEOUT_S)
    assert num_read, said
    return said


def read(address: str, folder: Path) -> int:
    """Read a stream of a server, which plans and decodes for it; the number of its microbatches."""
    catalog = Catalog.open(load_config(None, {"datasets": {"d": folder}}))
    data = job_data(datasets=[{"name": "d"}], end={"epochs": 1}, generation={"ratio": "0"})
    with DataClient([address], parse_job(fill_job(data, catalog)), "vit", 0) as client:
        return sum(1 for _ in client)


def compilations(said: str) -> list[str]:
    return re.findall(r"compil\w+", said)


def test_kernels_of_the_image_are_copied_not_compiled(tmp_path: Path) -> None:
    cache.use(None)
    compile_missing()  # as scripts/setup did
    own = cache.folder()
    assert own is not None
    shipped = tmp_path / "kernels" / own.name
    shutil.copytree(own, shipped)
    folder = index(write_pairs(tmp_path / "d", 8, 8))
    assert compilations(start(shipped.parent, folder)) == []


@pytest.mark.long
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_kernels_of_a_named_processor_level_are_copied_not_compiled(tmp_path: Path) -> None:
    """As the Dockerfile of servers builds them."""
    text = (ROOT / "deploy/images/server.Dockerfile").read_text()
    (level,) = set(re.findall(r"^ARG CPU=(\S+)", text, re.MULTILINE))
    processor = {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": ""}
    kernels = tmp_path / "kernels"
    done = subprocess.run(
        command("warm"), env={**os.environ, **processor, "NUMBA_CACHE_DIR": str(kernels)}, check=False,
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = index(write_pairs(tmp_path / "d", 8, 8))
    assert compilations(start(kernels, folder, **processor)) == []
