"""Rivals that want other packages than ours: each has a virtual environment of its own under build/loaders."""

import subprocess
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "build" / "loaders"
_DECODING: Final = ("simplejpeg==1.9.0", "opencv-python-headless==5.0.0.93", "pillow==13.0.0")
ENVIRONMENTS: Final = {
    # Its torch first: what resolves it beside torchvision may choose a build for GPUs.
    "energon": (("torch==2.13.0",), ("megatron-energon==7.4.1", "webdataset==1.0.2", *_DECODING)),
    # Without its numpy, pip looks at old releases of transformers for half an hour.
    "mosaic": (("torch==2.13.0",), ("mosaicml-streaming==0.13.0", "numpy==2.1.3", *_DECODING)),
    "tensorflow": (("tensorflow-cpu==2.21.0", *_DECODING),),
}
"""Packages of each environment, in the order in which they are installed."""
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
    log = home / "install.log"
    with log.open("w") as said:
        for packages in ENVIRONMENTS[environment]:
            pip = [home / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", *packages]
            if subprocess.run(pip, stdout=said, stderr=said, check=False).returncode:
                raise SystemExit(f"{environment} could not be installed; see {log}")
    (home / _COMPLETE).write_text(_described(environment))


def _described(environment: str) -> str:
    return repr(ENVIRONMENTS[environment])
