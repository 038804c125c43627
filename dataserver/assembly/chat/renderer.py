"""The process that renders chat templates: `python -I renderer.py CPU_SECONDS MEMORY_BYTES`.

A template is a program of strangers. Jinja's sandbox gives it no attribute, file or module, and no loader; it does not
stop nested loops, huge powers or texts that double. So it runs here, with little memory and CPU time, without a way to
write files or to start anything, and its clock stands still. This file imports nothing of ours.

Lines of JSON go in and out. It says that it is ready; the first line in names the templates and what all renderings are
given; every other one is a list of contexts, and the answer to it is {"texts": [...]}, or {"error": why}, or
{"exceeds": "memory"}.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime(2024, 7, 26)
MAX_CHARS = 1 << 24
"""Characters of the longest rendering that is accepted."""


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, which some templates put around answers: its content as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: without the HTML of Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return NOW.strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment of transformers, but for its clock and for what is random."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    del found.filters["random"], found.globals["lipsum"]  # the same conversation gives the same text
    found.filters["tojson"] = _tojson
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = _strftime_now
    return found


def compiled(of: ImmutableSandboxedEnvironment, text: str) -> jinja2.Template:
    """A template, which may name no other one. Raises TemplateError."""
    tree = of.parse(text)
    for name in jinja2.meta.find_referenced_templates(tree):
        of_name = "another template" if name is None else f"the template {name[:100]!a}"
        _refuse(f"it reads {of_name}, and templates have no files; write what it holds into the template")
    return of.from_string(tree)


def _limit(memory: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for none in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC):
        resource.setrlimit(none, (0, 0))


def _allow(seconds: int) -> None:
    """Let this process have so much more CPU time; the system ends it beyond."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, hard))


def _answer(work: Callable[[], list[str]]) -> str:
    try:
        return json.dumps({"texts": work()})
    except MemoryError:
        return json.dumps({"exceeds": "memory"})
    except RecursionError:
        return json.dumps({"error": "it calls itself without an end"})
    except Exception as error:  # whatever a template raises is its answer
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:500]})


def _render(templates: dict[bool, Any], shared: dict[str, Any], contexts: list[dict[str, Any]]) -> list[str]:
    texts = []
    for context in contexts:
        found = templates[bool(context["tools"])].render(**shared, **context)
        if len(found) > MAX_CHARS:
            raise ValueError(f"a rendering has {len(found)} characters, at most {MAX_CHARS} are allowed")
        texts.append(found)
    return texts


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Answer every line of standard input."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    of = environment()
    _write(json.dumps({"ready": True}))
    first = json.loads(sys.stdin.readline())
    _limit(memory)
    templates: dict[bool, Any] = {}

    def compile_both() -> list[str]:
        templates[False] = compiled(of, first["text"])
        templates[True] = compiled(of, first["text_for_tools"] or first["text"])
        return []

    _allow(seconds)
    _write(_answer(compile_both))
    while line := sys.stdin.readline():
        contexts = json.loads(line)
        _allow(seconds)
        _write(_answer(partial(_render, templates, first["tokens"], contexts)))


if __name__ == "__main__":
    main()
