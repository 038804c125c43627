"""Functions to commands: their parameters are the flags, their docstrings the help."""

import ast
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from dataserver import flags


def parse(command: Callable[..., Any], prog: str, arguments: Sequence[str]) -> Callable[[], Any]:
    """The command with its arguments, ready to be called. Ends the process where help is asked for.

    Raises:
        ValueError: the arguments do not fit; says which, what is nearest, and where help is.
    """

    command.__doc__ = help_text(command)

    @functools.wraps(command)
    def ready(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(command, *args, **kwargs)

    def parsed(given: Sequence[str]) -> Callable[[], Any]:
        return tyro.cli(ready, prog=prog, args=given, config=(tyro.conf.DisallowNone, tyro.conf.EnumChoicesFromValues))

    found: Callable[[], Any] = flags.parse(parsed, arguments, prog)
    return found


def help_text(command: Callable[..., Any]) -> str | None:
    """The docstring with each argument on one line: where the source breaks a line, help would break it, too."""
    text = command.__doc__ or docstring(command)
    return text and re.sub(r"\n {8,}(?=\S)", " ", inspect.cleandoc(text))


def docstring(command: Callable[..., Any]) -> str | None:
    """What help is made of, from the source: `python -OO` drops it."""
    try:
        (function,) = ast.parse(inspect.getsource(command)).body
    except OSError:  # there is no source
        return None
    assert isinstance(function, ast.FunctionDef)
    return ast.get_docstring(function)
