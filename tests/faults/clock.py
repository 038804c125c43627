"""The wall clock of a process, which jumps while the process runs; other processes keep theirs."""

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def missing() -> str:
    """Why no clock can jump here; empty where it can."""
    return "" if shutil.which("cc") else "a clock that jumps needs a C compiler (cc)"


class WallClock:
    """What processes started with `environment` take for the time of day."""

    def __init__(self, folder: Path) -> None:
        """Build the library that moves the clock."""
        library, self._offset = folder / "clock.so", folder / "clock.offset"
        self.jump_to(0)
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
        self.environment = {"LD_PRELOAD": str(library), "FAULTS_CLOCK": str(self._offset)}

    def jump_to(self, offset_s: int) -> None:
        """Move the clock to so many seconds after the true time; before it, if negative."""
        mode = "r+b" if self._offset.exists() else "wb"  # in place: the processes map this file
        with self._offset.open(mode) as file:
            file.write(struct.pack("=q", offset_s))
