"""Wheels that a container with torch for CUDA usually has not: gathered here, installed there without a network."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    "annotated-types", "braceexpand", "crc32c", "docstring-parser", "googleapis-common-protos", "pydantic",
    "pydantic-core", "pytest-timeout", "rfc8785", "simplejpeg", "typeguard", "typing-extensions", "typing-inspection",
    "tyro", "webdataset", "zstandard",
)  # fmt: skip
"""Packages in the versions of the environment that gathers them, so those that the tests ran with."""
PINNED: Final = tuple(f"grpcio-{part}==1.76.0" for part in ("health-checking", "reflection", "status"))
"""The oldest that are allowed: they refuse an older grpcio than their own, and the container brings its own."""
PLATFORMS: Final = tuple(f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014", "1"))
MAX_BYTES: Final = 60 * 10**6
"""Most bytes of all wheels together, so that they travel with a checkout."""


class WheelError(RuntimeError):
    """Wheels that could not be gathered or installed; the message says why."""


def make(folder: Path, python: str) -> int:
    """Gather the wheels for a version of Python into a folder, which is replaced.

    Returns:
        How many bytes they have.

    Raises:
        WheelError: pip failed, or they have more than `MAX_BYTES`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    wanted = [f"{name}=={version(name)}" for name in PACKAGES]
    command = ["download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    _pip(*command, *platforms, "--dest", str(folder), *wanted, *PINNED)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise WheelError(f"{folder} has {size / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:g} MB are to travel")
    return size


def install(folder: Path, target: Path) -> None:
    """Install all wheels of a folder into another one, without a network and without what they depend on.

    Raises:
        WheelError: there are none, or pip failed.
    """
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise WheelError(f"there are no wheels in {folder}; make some with `scripts/gpu_check --make-wheels {folder}`")
    # Nothing is compiled: what is imported is compiled then.
    _pip("install", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(target), *wheels)
    _register_checkout(target)


def _register_checkout(target: Path) -> None:
    """Say which release the checkout is, which servers tell; an installation would."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    name, release = project["name"], project["version"]
    folder = target / f"{name}-{release}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")


def _pip(*arguments: str) -> None:
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", "PIP_NO_CACHE_DIR": "1"}
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"pip {arguments[0]} failed: {done.stderr.strip()[-1000:]}")
