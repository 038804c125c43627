"""How a command ends."""

from collections.abc import Callable

from trainclient.report import USER_ERROR, report, seen_enough


def ended(run: Callable[[], None]) -> int:
    """Run a command and give its exit code; what the user can put right is one line on stderr."""
    try:
        run()
    except BrokenPipeError:
        return seen_enough()
    except (ValueError, OSError) as error:
        return report("trainclient", error, USER_ERROR)
    return 0
