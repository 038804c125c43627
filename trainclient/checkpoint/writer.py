"""Torch's writer of checkpoint files, with errors that say what the system said."""

from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class PlainWriter(FileSystemWriter):
    """Names what stopped it; of a full disk, torch says at which position of its archive it found itself."""

    def __init__(self, path: Path, files: FileSystem) -> None:
        """Write into a folder, by `files`."""
        super().__init__(path)
        self.fs = files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the data as torch asks for it. Raises OSError where the system refused something."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            refusal = _refusal(error)
            if refusal is None:
                raise
            raise OSError(refusal.errno, refusal.strerror) from None


def _refusal(error: BaseException | None) -> OSError | None:
    """What the system said, which other errors may have followed."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error
