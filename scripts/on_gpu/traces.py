"""What a trace of torch's profiler says of one step: `python -m on_gpu.traces TRACE.json` prints it as JSON.

Times in a trace are microseconds. Host and device share a clock. Annotations are the trainer's operations, such as
"forward of microbatch 3 of step 13"; what is launched in one belongs to it, whatever thread launches.
"""

import bisect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

ON_DEVICE: Final = {"kernel", "gpu_memcpy", "gpu_memset"}
RUNTIME: Final = {"cuda_runtime", "cuda_driver"}
KINDS: Final = (
    ("messages", r"nccl"),
    ("attention", r"flash|fmha|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul"),
    ("optimizer and foreach", r"multi_tensor|foreach|adam"),
    ("copies and zeros", r"memcpy|memset|fillfunctor|copy_kernel|direct_copy|catarraybatched"),
    ("compiled", r"triton"),
    ("sums", r"reduce|norm|softmax"),
    ("elementwise", r"elementwise|index|gather|scatter"),
)
"""Kinds of kernels by parts of their names; the first that fits."""
WAITING: Final = re.compile(r"Synchronize|cu(da)?Malloc|cu(da)?Free|HostAlloc|HostRegister|cudaMemcpy$|MemMap|MemUnmap")
"""Calls that wait for the device, or may."""
LAUNCHING: Final = re.compile(r"Launch")
EDGES_US: Final = (10, 100, 1000, 10_000)
"""Gaps of the device are counted between these."""
LARGEST: Final = 20
NAME: Final = 110


@dataclass(frozen=True, slots=True)
class Event:
    """Something with a beginning and a length."""

    name: str
    category: str
    begin: float
    length: float
    thread: Any
    correlation: int | None

    @property
    def end(self) -> float:
        """When the event was over."""
        return self.begin + self.length


def read(path: Path) -> list[Event]:
    """All events of a trace that have a length."""
    with path.open() as file:
        found = json.load(file)["traceEvents"]
    return [
        Event(e["name"], e.get("cat", ""), e["ts"], e["dur"], (e.get("pid"), e.get("tid")), _correlation(e))
        for e in found
        if e.get("ph") == "X"
    ]


def summary(events: Sequence[Event]) -> dict[str, Any]:
    """Sum up one step: kernels, gaps, launches and waits. Without a device the host's operations alone."""
    device = sorted((e for e in events if e.category in ON_DEVICE), key=lambda e: e.begin)
    host = [e for e in events if e.category in (*RUNTIME, "cpu_op", "user_annotation")]
    told: dict[str, Any] = {"host_operations": sum(e.category == "cpu_op" for e in host)}
    if not device:
        return told | {"kernels": 0, "operations": _ranked(e for e in host if e.category == "cpu_op")}
    begin, end = min(e.begin for e in (*device, *host)), max(e.end for e in (*device, *host))
    spans = _union(device)
    busy = sum(b - a for a, b in spans)
    gaps = [(a, b) for (_, a), (b, _) in zip([(begin, begin), *spans], [*spans, (end, end)], strict=True) if b > a]
    calls = [e for e in host if e.category in RUNTIME]
    annotations = Annotations([e for e in host if e.category == "user_annotation"])
    return told | {
        "window_ms": (end - begin) / 1000,
        "busy_percent": 100 * busy / (end - begin),
        "kernels": sum(e.category == "kernel" for e in device),
        "launches": sum(bool(LAUNCHING.search(e.name)) for e in calls),
        "by_kind": _kinds(device),
        "by_name": _ranked(device),
        "idle_by_length": _histogram(gaps),
        "largest_gaps": _largest(gaps, host, begin),
        "waits": _ranked(e for e in calls if WAITING.search(e.name)),
        "longest_waits": _longest([e for e in calls if WAITING.search(e.name)], annotations, begin),
        "by_operation": _operations(device, calls, annotations),
    }


class Annotations:
    """The trainer's operations, none inside another: the outermost ones."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events: list[Event] = []
        for event in sorted(events, key=lambda e: (e.begin, -e.length)):
            if not self.events or event.begin >= self.events[-1].end:
                self.events.append(event)
        self._begins = [e.begin for e in self.events]

    def at(self, moment: float) -> str:
        """Return the operation that ran at a moment."""
        number = bisect.bisect_right(self._begins, moment) - 1
        inside = number >= 0 and moment < self.events[number].end
        return self.events[number].name if inside else "between operations (sums, update, metrics)"


def _correlation(event: dict[str, Any]) -> int | None:
    found = (event.get("args") or {}).get("correlation")
    return None if found is None else int(found)


def _union(events: Iterable[Event]) -> list[tuple[float, float]]:
    """When any of some events ran, which come in order of their begins."""
    spans: list[tuple[float, float]] = []
    for event in events:
        if spans and event.begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], event.end)
        else:
            spans.append((event.begin, event.end))
    return spans


def _ranked(events: Iterable[Event], number: int = LARGEST) -> list[dict[str, Any]]:
    """Names by the time that they take together."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for event in events:
        lengths[event.name].append(event.length)
    total = sum(map(sum, lengths.values()))
    ranked = sorted(lengths.items(), key=lambda item: -sum(item[1]))[:number]
    return [_entry(name, found, total) for name, found in ranked]


def _entry(name: str, lengths: Sequence[float], total: float) -> dict[str, Any]:
    share = 100 * sum(lengths) / total if total else 0.0
    return {"name": name[:NAME], "count": len(lengths), "ms": sum(lengths) / 1000, "percent": share}


def _kinds(device: Iterable[Event]) -> list[dict[str, Any]]:
    """Sum up kernels by their kind."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for event in device:
        name = event.name.lower()
        lengths[next((kind for kind, part in KINDS if re.search(part, name)), "other")].append(event.length)
    total = sum(map(sum, lengths.values()))
    return [_entry(name, found, total) for name, found in sorted(lengths.items(), key=lambda item: -sum(item[1]))]


def _histogram(gaps: Iterable[tuple[float, float]]) -> list[dict[str, Any]]:
    edges = (0, *EDGES_US, float("inf"))
    lengths = [b - a for a, b in gaps]
    told = []
    for low, high in pairwise(edges):
        found = [length for length in lengths if low <= length < high]
        told.append({"from_us": low, "count": len(found), "ms": sum(found) / 1000})
    return told


def _largest(gaps: Sequence[tuple[float, float]], host: Sequence[Event], begin: float) -> list[dict[str, Any]]:
    """The largest gaps of the device, with what the host did most of the time then."""
    told = []
    for a, b in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:LARGEST]:
        during = [(min(b, e.end) - max(a, e.begin), e) for e in host if e.begin < b and e.end > a]
        did = {
            kind: [
                f"{e.name[:NAME]} ({overlap / 1000:.2f} ms)"
                for overlap, e in sorted(((o, e) for o, e in during if e.category in of), key=lambda p: -p[0])[:3]
            ]
            for kind, of in (("in", {"user_annotation"}), ("operations", {"cpu_op"}), ("calls", RUNTIME))
        }
        told.append({"at_ms": (a - begin) / 1000, "ms": (b - a) / 1000, **did})
    return told


def _longest(calls: Iterable[Event], annotations: Annotations, begin: float) -> list[dict[str, Any]]:
    ranked = sorted(calls, key=lambda e: -e.length)[:LARGEST]
    return [
        {"name": e.name, "ms": e.length / 1000, "at_ms": (e.begin - begin) / 1000, "in": annotations.at(e.begin)}
        for e in ranked
    ]


def _operations(device: Sequence[Event], calls: Sequence[Event], annotations: Annotations) -> list[dict[str, Any]]:
    """Sum up each operation of the step: what the host took, and what the device did for it."""
    launched = {e.correlation: annotations.at(e.begin) for e in calls}
    told: dict[str, dict[str, Any]] = {}
    for event in annotations.events:
        told.setdefault(event.name, _nothing(event.name))["host_ms"] += event.length / 1000
    for event in device:
        name = launched.get(event.correlation, "launched before the trace")
        entry = told.setdefault(name, _nothing(name))
        entry["device_ms"] += event.length / 1000
        entry["kernels"] += 1
    for call in calls:
        if WAITING.search(call.name):
            name = annotations.at(call.begin)
            entry = told.setdefault(name, _nothing(name))
            entry["waits"] += 1
            entry["waits_ms"] += call.length / 1000
    return list(told.values())


def _nothing(name: str) -> dict[str, Any]:
    return {"name": name[:NAME], "host_ms": 0.0, "device_ms": 0.0, "kernels": 0, "waits": 0, "waits_ms": 0.0}


if __name__ == "__main__":
    json.dump(summary(read(Path(sys.argv[1]))), sys.stdout)
