"""A disk that is full."""

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def missing() -> str:
    """Why there can be no small disk here; empty where there can."""
    return "" if os.geteuid() == 0 else "a disk that is full is a mount, which root may make"


@contextmanager
def small_disk(folder: Path, kibibytes: int = 64) -> Iterator[Path]:
    """A file system of that size at `folder`, unmounted with the block."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> Path:
    """Write until nothing more fits; the file that takes it all."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return filler
