"""How a command ends."""

import os
import sys
from collections.abc import Callable

from trainclient.report import FAILURE, USER_ERROR, report


def ended(run: Callable[[], None]) -> int:
    """Run a command and give its exit code; what the user can put right is one line on stderr."""
    try:
        run()
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except (ValueError, OSError) as error:
        return report("trainclient", error, USER_ERROR)
    return 0
