"""What pyproject.toml asks for is enough: fresh environments with the lowest versions that it permits."""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.server_process import serving
from golden.dataset import write_golden
from golden.transcript import JOB, load

from dataserver.assembly import content_digest, load_tokenizer
from dataserver.dataset import count_tokens
from dataserver.dataset.index.build import build_index

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROOT = Path(__file__).resolve().parents[1]
SERVE = """
import sys
from pathlib import Path
from dataserver.cli import main
from dataserver.assembly import content_digest
from golden.dataset import write_golden
from golden.transcript import load, record
assert main(["warm"]) == 0  # no call of the transcript waits for a compiler
for folder in write_golden(Path("data")).values():
    assert main(["index", str(folder)]) == 0
    assert main(["lint", str(folder)]) in (0, 1)
golden = {exchange.name: exchange for exchange in load()}
for found in record():
    wanted = golden.pop(found.name)
    if found.name.endswith("_zstd"):
        assert found.hashes() == wanted.hashes(), found.name
    else:
        assert (found.answers, found.error) == (wanted.answers, wanted.error), found.name
assert not golden
print(content_digest())
"""
READ = """
import hashlib, importlib.util, json, sys
from trainclient.stream.client import ArrayClient
for extra in ("cv2", "numba", "PIL", "pyarrow", "torch"):
    assert importlib.util.find_spec(extra) is None, extra
address, job, module = sys.argv[1:]
with ArrayClient(address, job, module, 0) as client:
    read = [{name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in batch.tensors.items()}
            for batch in client]
print(json.dumps(read))
"""


@pytest.fixture(scope="module")
def uv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tool that finds the lowest versions, in an environment of its own."""
    folder = tmp_path_factory.mktemp("uv")
    venv.create(folder, with_pip=True)
    installed = subprocess.run([folder / "bin" / "pip", "install", "-q", "uv"], capture_output=True, check=False)
    if installed.returncode:
        pytest.skip("uv cannot be installed: no package index can be reached")
    return folder / "bin" / "uv"


def interpreters(version: str) -> Iterator[str]:
    """Interpreters of a version of Python that may be at hand."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield sys.executable
    yield from map(str, sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")))
    if found := shutil.which(f"python{version}"):
        yield found


def environment(uv: Path, folder: Path, python: str, *extras: str) -> Path:
    """An interpreter with the lowest versions of what this package needs, and the package."""
    made, listed = folder / "venv" / "bin" / "python", folder / "lowest.txt"

    def run(*arguments: str | Path) -> None:
        done = subprocess.run([uv, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    run("venv", "-q", "--python", python, folder / "venv")
    chosen = [argument for extra in extras for argument in ("--extra", extra)]
    lowest = ("--resolution", "lowest-direct", "--only-binary", ":all:")
    run("pip", "compile", "-q", "pyproject.toml", *chosen, *lowest, "--python", made, "-o", listed)
    run("pip", "install", "-q", "--python", made, "--only-binary", ":all:", "-r", listed)
    run("pip", "install", "-q", "--python", made, "--no-deps", ".")
    return made


def output(python: Path, folder: Path, code: str, *arguments: str) -> str:
    """What a program prints last that imports the installed package, not this one."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")} | {
        "PYTHONPATH": str(ROOT / "scripts"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    done = subprocess.run(
        [python, "-c", code, *arguments], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_a_server_of_the_lowest_versions_serves_the_golden_stream(uv: Path, tmp_path: Path, version: str) -> None:
    python = next(interpreters(version), None)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    lowest = environment(uv, tmp_path, python, "server")
    assert output(lowest, tmp_path, SERVE) == content_digest()


def test_without_extras_there_is_the_numpy_client(uv: Path, tmp_path: Path) -> None:
    datasets = write_golden(tmp_path / "data")
    for folder in datasets.values():
        build_index(folder, workers=1)
        count_tokens(folder, load_tokenizer("bytes"))
    job = tmp_path / "job.json"
    job.write_text(json.dumps(JOB))
    lowest = environment(uv, tmp_path, sys.executable)
    flags = [argument for name, path in datasets.items() for argument in ("--dataset", f"{name}={path}")]
    golden = {exchange.name: exchange for exchange in load()}
    with serving(*flags) as server:
        for module in ("vit", "llm", "gen"):
            read = json.loads(output(lowest, tmp_path, READ, server.address, str(job), module))
            assert read == golden[f"stream_{module}_0"].hashes()
