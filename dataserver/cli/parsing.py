"""Flags to arguments: tyro parses, and what it refuses becomes one line."""

import ast
import difflib
import functools
import inspect
import io
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

import tyro


def parse(command: Callable[..., Any], prog: str, arguments: Sequence[str]) -> Callable[[], Any]:
    """The command with its arguments, ready to be called. Ends the process where help is asked for.

    Raises:
        ValueError: the arguments do not fit; says which, what is nearest, and where help is.
    """

    command.__doc__ = command.__doc__ or docstring(command)

    @functools.wraps(command)
    def ready(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(command, *args, **kwargs)

    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            found: Callable[[], Any] = _parsed(ready, prog, arguments)
            return found
    except SystemExit as end:
        if not end.code:
            raise
    raise ValueError(f"{_reason(errors.getvalue(), ready, prog)}; `{prog} --help` lists the options")


def docstring(command: Callable[..., Any]) -> str | None:
    """What help is made of, from the source: `python -OO` drops it."""
    try:
        (function,) = ast.parse(inspect.getsource(command)).body
    except OSError:  # there is no source
        return None
    assert isinstance(function, ast.FunctionDef)
    return ast.get_docstring(function)


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing if no known word is near."""
    found = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


def _parsed(ready: Callable[..., Any], prog: str, arguments: Sequence[str]) -> Any:
    return tyro.cli(ready, prog=prog, args=arguments, config=(tyro.conf.DisallowNone, tyro.conf.EnumChoicesFromValues))


def _reason(text: str, ready: Callable[..., Any], prog: str) -> str:
    """The first statement in tyro's box; of several, the one about options that it does not know."""
    lines = [line.strip("│╭╮╰╯ ") for line in text.splitlines()[1:]]  # the first is a heading
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{4,}", "\n".join(lines)) if part.strip()]
    wrong = next((part for part in parts if part.startswith("Unrecognized")), None)
    if wrong is None:
        return parts[0] if parts else "the arguments do not fit"
    word = wrong.partition(":")[2].split()[0].strip(",").partition("=")[0]
    shown = io.StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        _parsed(ready, prog, ["--help"])
    known = sorted(set(re.findall(r"--[a-z][\w.-]*", shown.getvalue())))
    return f"{word} is unknown{nearest(word, known)}"
