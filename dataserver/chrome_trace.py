"""Chrome trace events (Trace Event Format), for ui.perfetto.dev and chrome://tracing."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Event = dict[str, Any]


def metadata(what: str, process: int, thread: int, **values: Any) -> Event:
    """The name or the position of a process or thread: `what` is `process_name`, `thread_sort_index` and the like."""
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": values}


def bar(process: int, thread: int, name: str, category: str, start_ns: int, end_ns: int, **values: Any) -> Event:
    """What a thread did from one time to another; `values` are shown where it is selected."""
    times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    found = {"ph": "X", "name": name, "cat": category, **times, "pid": process, "tid": thread}
    return {**found, "args": values} if values else found


def trace_json(events: Iterable[Event], about: Mapping[str, Any]) -> str:
    """The file of a trace; `about` says what it is of."""
    content = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(content, allow_nan=False)
