"""libtiff writes lines to stderr for whatever it finds wrong with a file. Pillow's exceptions tell that too."""

import ctypes
import functools
import logging
from pathlib import Path
from typing import Final

_MAPS: Final = Path("/proc/self/maps")
_log = logging.getLogger(__name__)


@functools.cache
def silence() -> bool:
    """Take libtiff's handler of errors away, for the whole process; whether that was possible.

    Pillow has no switch for it, and another stderr would be that of all threads. The library is Pillow's own or the
    system's, which is loaded once Pillow's reader of TIFF is.
    """
    try:
        lines = _MAPS.read_text().splitlines()
        paths = {line[line.index("/") :] for line in lines if "/libtiff" in line}
        for path in paths:
            library = ctypes.CDLL(path)
            for name in ("TIFFSetErrorHandler", "TIFFSetWarningHandler"):
                handler = getattr(library, name)
                handler.restype, handler.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
                handler(None)
    except (OSError, AttributeError) as error:
        _log.info("libtiff cannot be silenced (%s): damaged TIFFs are lines on stderr, and errors as all others", error)
        return False
    return bool(paths)
