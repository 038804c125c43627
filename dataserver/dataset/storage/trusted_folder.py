"""Folders of this machine whose files are trusted: nobody else may have written them."""

from pathlib import Path

from dataserver.dataset.errors import DatasetError
from dataserver.planning.kernels.cache import is_ours


def own_folder(folder: Path, what: str) -> Path:
    """Return a folder that belongs to this user or root, made where it is missing.

    Args:
        folder: which.
        what: names it in messages, with what asked for it.

    Raises:
        DatasetError: others may write to it, or this user cannot use it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise DatasetError(
            f"{what} {folder} cannot be used ({error.strerror}); name a folder that you may write to"
        ) from error
    if not is_ours(about):
        raise DatasetError(
            f"{what} {folder} belongs to another user, or others may write to it; correct that (chmod go-w), or name"
            " another folder"
        )
    return folder
