"""Exit codes of commands whose errors a user can put right."""

from collections.abc import Callable

from trainclient.report import USER_ERROR, report


def exit_code(run: Callable[[], None]) -> int:
    """Run a command and give its exit code; what the user can put right is one line on stderr.

    Raises:
        BrokenPipeError: nobody reads its output any more.
    """
    try:
        run()
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        return report("trainclient", error, USER_ERROR)
    return 0
