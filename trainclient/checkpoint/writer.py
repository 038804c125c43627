"""Torch's writer of checkpoint files, with errors that say what the system said."""

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class PlainWriter(FileSystemWriter):
    """Names what stopped it; of a full disk, torch says at which position of its archive it found itself."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """See torch. Raises OSError where the system refused something."""
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
