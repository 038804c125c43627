"""Spans: what took how long on behalf of what. Those of one thread are nested; others are given their context.

A span is recorded only within one that is: what begins without a context costs a look at a variable.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from time import time_ns
from typing import Final, Protocol, Self, TypeVar

Attribute = str | int
Metadata = tuple[tuple[str, str], ...]
"""Metadata of a gRPC call."""
Result = TypeVar("Result")

TRACEPARENT: Final = "traceparent"
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f][13579bdf]")
"""A W3C Trace Context: a version, a trace, its span, and flags; the last bit means that it is sampled."""


class Kind(StrEnum):
    """What a span is to others."""

    INTERNAL = "internal"
    CLIENT = "client"
    """It waits for another process."""
    SERVER = "server"
    """Another process waits for it."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A span that is over."""

    name: str
    kind: Kind
    trace_id: int
    span_id: int
    parent_id: int
    """0 for the root of a trace."""
    start_ns: int
    """Since 1970, as is the end."""
    end_ns: int
    attributes: dict[str, Attribute]
    error: str
    """The class of the exception that ended it; empty if none did. Messages stay in the log: they may hold paths."""


class Recorder(Protocol):
    """Takes spans that are over. Thread-safe, and never waits."""

    def record(self, finished: Finished) -> None:
        """Take a span that has finished."""


@dataclass(frozen=True, slots=True)
class Context:
    """What spans belong to that begin within it."""

    recorder: Recorder
    trace_id: int
    span_id: int


_current: ContextVar[Context | None] = ContextVar("current", default=None)


class Span:
    """A span that goes on until `end`, or as a context manager, to the end of the block."""

    def __init__(self, parent: Context | None, name: str, kind: Kind, attributes: dict[str, Attribute]) -> None:
        self.context = None if parent is None else Context(parent.recorder, parent.trace_id, new_span_id())
        """For spans within it; None if it is not recorded."""
        self._parent = parent
        self._name = name
        self._kind = kind
        self._attributes = attributes
        self._start_ns = time_ns()

    def note(self, **attributes: Attribute) -> None:
        """Add attributes that became known."""
        self._attributes.update(attributes)

    def end(self, error: BaseException | None = None) -> None:
        """Record it; a second time changes nothing."""
        parent, self._parent = self._parent, None
        if parent is None or self.context is None:
            return
        finished = Finished(
            name=self._name,
            kind=self._kind,
            trace_id=parent.trace_id,
            span_id=self.context.span_id,
            parent_id=parent.span_id,
            start_ns=self._start_ns,
            end_ns=time_ns(),
            attributes=self._attributes,
            error="" if error is None else type(error).__name__,
        )
        parent.recorder.record(finished)

    def __enter__(self) -> Self:
        self._token = _current.set(self.context)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _current.reset(self._token)
        self.end(error)


class _NoSpan(Span):
    """Stands for all spans that are not recorded."""

    def note(self, **attributes: Attribute) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pass


_NO_SPAN: Final = _NoSpan(None, "", Kind.INTERNAL, {})


def opened(parent: Context | None, name: str, kind: Kind = Kind.INTERNAL, **attributes: Attribute) -> Span:
    """A span that begins now within a context; one that is not recorded where there is none."""
    return _NO_SPAN if parent is None else Span(parent, name, kind, attributes)


def span(name: str, kind: Kind = Kind.INTERNAL, **attributes: Attribute) -> Span:
    """A span that begins now within the one that this thread is in."""
    return opened(_current.get(), name, kind, **attributes)


@contextmanager
def within(context: Context | None) -> Iterator[None]:
    """A block whose spans belong to a context, such as that of a span of another thread."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def carried(function: Callable[[], Result]) -> Callable[[], Result]:
    """A function that runs in the context of this thread, whichever thread calls it."""
    context = _current.get()
    if context is None:
        return function

    def call() -> Result:
        with within(context):
            return function()

    return call


def outgoing() -> Metadata | None:
    """What tells the receiver of a call the span that this thread is in; None where it is in none."""
    context = _current.get()
    return None if context is None else ((TRACEPARENT, traceparent(context.trace_id, context.span_id)),)


def incoming(recorder: Recorder | None, metadata: Iterable[tuple[str, str | bytes]]) -> Context | None:
    """The context that the sender of a call told; None where it told none that is sampled, or nobody records."""
    if recorder is None:
        return None
    for key, value in metadata:
        if key == TRACEPARENT and isinstance(value, str) and (match := _TRACEPARENT.fullmatch(value)):
            return Context(recorder, int(match[1], 16), int(match[2], 16))
    return None


def traceparent(trace_id: int, span_id: int) -> str:
    """A sampled span as W3C Trace Context writes it."""
    return f"00-{trace_id:032x}-{span_id:016x}-01"


def new_span_id() -> int:
    """A random number of 64 bits, not 0."""
    return secrets.randbelow((1 << 64) - 1) + 1
