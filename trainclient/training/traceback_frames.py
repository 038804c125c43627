"""Which frames of a stack help whoever reads an error."""

import sysconfig
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parents[1]
_OTHERS: Final = (
    *(_PACKAGE.parent / name for name in ("dataserver", "protos")),
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
)


def is_ours(file: str) -> bool:
    """Whether a source file is the trainer's."""
    return Path(file).is_relative_to(_PACKAGE)


def is_users(file: str) -> bool:
    """Whether a source file is of nobody else, such as that of a module of the user's own."""
    return not (file.startswith("<") or is_ours(file) or any(Path(file).is_relative_to(folder) for folder in _OTHERS))
