"""NVIDIA's MPS, under which kernels of several processes run on one device at the same time.

Without it they take turns: a kernel that waits for another process holds the device until its turn ends. Nothing of the
device's settings is changed: a server is started that processes with its variables use, and ended again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PROBE: Final = "import torch; x = torch.ones(8, device='cuda'); assert float((x + x).sum()) == 16"
PROBE_S: Final = 40.0
CONTROL: Final = "nvidia-cuda-mps-control"


@contextmanager
def mps() -> Iterator[tuple[Mapping[str, str] | None, str]]:
    """The variables of processes that use it, or None; and what to say of it."""
    control = shutil.which(CONTROL)
    if control is None:
        yield None, f"there is no {CONTROL}: processes take turns on the device"
        return
    folder = Path(tempfile.mkdtemp(prefix="mps-"))  # a path that is too long is refused
    variables = {f"CUDA_MPS_{name}_DIRECTORY": str(folder / name.lower()) for name in ("PIPE", "LOG")}
    for path in variables.values():
        Path(path).mkdir()
    environment = os.environ | variables
    try:
        subprocess.run([control, "-d"], env=environment, check=True, timeout=20, capture_output=True)
        subprocess.run([sys.executable, "-c", PROBE], env=environment, check=True, timeout=PROBE_S, capture_output=True)
    except (subprocess.SubprocessError, OSError) as error:
        _end(control, environment)
        shutil.rmtree(folder, ignore_errors=True)
        said = getattr(error, "stderr", b"") or b""
        yield None, f"MPS does not work here ({error}; {said.decode(errors='replace')[-300:]}): processes take turns"
        return
    try:
        yield variables, "kernels of all processes run at the same time (MPS)"
    finally:
        _end(control, environment)
        shutil.rmtree(folder, ignore_errors=True)


def _end(control: str, environment: Mapping[str, str]) -> None:
    try:
        subprocess.run([control], env=environment, input=b"quit\n", check=False, timeout=20, capture_output=True)
    except (subprocess.SubprocessError, OSError) as error:
        sys.stderr.write(f"{CONTROL} did not take quit: {error}\n")
