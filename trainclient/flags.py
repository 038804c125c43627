"""What tyro refuses, in one line."""

import difflib
import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any


def parse(parsed: Callable[[list[str]], Any], arguments: list[str], prog: str) -> Any:
    """What a parser makes of the arguments. Ends the process where help is asked for.

    Raises:
        ValueError: they do not fit; says which, what is nearest, and where help is.
    """
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            return parsed(arguments)
    except SystemExit as end:
        if not end.code:
            raise
    lines = [line.strip("│╭╮╰╯ ") for line in errors.getvalue().splitlines()[1:]]  # the first is a heading
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{4,}", "\n".join(lines)) if part.strip()]
    reason = next((part for part in parts if part.startswith("Unrecognized")), "".join(parts[:1]))
    if reason.startswith("Unrecognized"):
        word = reason.partition(":")[2].split()[0].strip(",").partition("=")[0]
        shown = io.StringIO()
        with redirect_stdout(shown), suppress(SystemExit):
            parsed(["--help"])
        near = difflib.get_close_matches(word, sorted(set(re.findall(r"--[a-z][\w.-]*", shown.getvalue()))), 1)
        reason = f"{word} is unknown" + (f"; did you mean {near[0]}?" if near else "")
    elif found := re.fullmatch(r"Error parsing (\S+): \d+ validation errors? for \w+ (.*)", reason):  # of pydantic
        problems = re.findall(r"(\S+) (.+?) \[type=.+?\] For further information visit \S+", found[2])
        within = "" if found[1][:1].isupper() else f"{found[1].removeprefix('--')}."  # of a class: options of its own
        reason = (
            "; ".join(
                f"--{within}{field.replace('_', '-')}: {problem.removeprefix('Value error, ')}"
                for field, problem in problems
            )
            or reason
        )
    elif found := re.match(r"Error parsing (\S+): no type matching (.+?) could be instantiated from \[(.*?)\]", reason):
        reason = f"{found[1]}: {found[3]} is given, {found[2]} is required"
    raise ValueError(f"{reason}; `{prog} --help` lists the options")
