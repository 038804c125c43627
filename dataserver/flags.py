"""What tyro refuses, in one line, for the commands of both sides."""

import difflib
import io
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any


def parse(parsed: Callable[[Sequence[str]], Any], arguments: Sequence[str], prog: str) -> Any:
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
    raise ValueError(f"{_reason(errors.getvalue(), parsed)}; `{prog} --help` lists the options")


def one_line(text: str) -> str:
    """A help text without the line breaks of its source, since help breaks lines where the terminal does."""
    return " ".join(text.split())


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing if no known word is near."""
    found = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


def _reason(text: str, parsed: Callable[[Sequence[str]], Any]) -> str:
    """The first statement in tyro's box; of several, the one about options that it does not know."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines()[1:]]  # the first is a heading
    parts = [one_line(part) for part in re.split(r"[─-]{4,}", "\n".join(lines)) if part.strip()]
    if unknown := next((part for part in parts if part.startswith("Unrecognized")), None):
        word = unknown.partition(":")[2].split()[0].strip(",").partition("=")[0]
        shown = io.StringIO()
        with redirect_stdout(shown), suppress(SystemExit):
            parsed(["--help"])
        known = sorted(set(re.findall(r"--[a-z][\w.-]*", shown.getvalue())))
        return f"{word} is unknown{nearest(word, known)}"
    reason = parts[0] if parts else "the arguments do not fit"
    if found := re.fullmatch(r"Error parsing (\S+): \d+ validation errors? for \w+ (.*)", reason):  # of pydantic
        problems = re.findall(r"(\S+) (.+?) \[type=.+?\] For further information visit \S+", found[2])
        within = "" if found[1][:1].isupper() else f"{found[1].removeprefix('--')}."  # of a class: options of its own
        each = (
            f"--{within}{field.replace('_', '-')}: {what.removeprefix('Value error, ')}" for field, what in problems
        )
        return "; ".join(each) or reason
    if found := re.match(r"Error parsing (\S+): no type matching (.+?) could be instantiated from \[(.*?)\]", reason):
        return f"{found[1]}: {found[3]} is given, {found[2]} is required"
    return reason
