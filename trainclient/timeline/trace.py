"""A step as Chrome trace events, for ui.perfetto.dev: each process planned, and right below it as recorded."""

from collections.abc import Iterator, Sequence

from dataserver.chrome_trace import Event, bar, metadata
from dataserver.planning.simulation import Operation, OperationKind
from trainclient.timeline.tracks import Track


def trace_events(tracks: Sequence[Track]) -> Iterator[Event]:
    """The events of a step: a process for each module, two threads for each of its ranks and stages.

    In measured threads each operation follows what it waited for: its microbatch, ranks that send, their rows.
    """
    modules = list(dict.fromkeys(track.holds for track in tracks))
    for number, module in enumerate(modules):
        yield metadata("process_name", number, 0, name=module)
    for number, track in enumerate(tracks):
        process, planned, recorded = modules.index(track.holds), 2 * number, 2 * number + 1
        for thread, what in ((planned, "planned"), (recorded, "measured")):
            yield metadata("thread_name", process, thread, name=f"{track.name}, {what}")
            yield metadata("thread_sort_index", process, thread, sort_index=thread)
        times = zip(track.operations, track.planned_start_ns.tolist(), track.planned_end_ns.tolist(), strict=True)
        for operation, start, end in times:
            yield bar(process, planned, _name(operation), operation.kind, start, end)
        yield from _profiled(track, process, recorded)


def _profiled(track: Track, process: int, thread: int) -> Iterator[Event]:
    found = track.recorded
    waits = found.data_ns, found.waited_ns, found.moved_ns
    columns = (found.start_ns, found.end_ns, found.done_ns, *waits, track.excess_ns, found.within_ns)
    for operation, *values in zip(track.operations, *(c.tolist() for c in columns), strict=True):
        start, end, done, data, waited, moved, excess, within = values
        name, sent = _name(operation), start - moved
        if data:
            yield bar(process, thread, f"{name}: its microbatch", "data", sent - waited - data, sent - waited)
        if waited:
            yield bar(process, thread, f"{name}: ranks", "ranks", sent - waited, sent)
        if moved:
            yield bar(process, thread, f"{name}: rows", "transfer", sent, start)
        about = {
            "microbatch": operation.microbatch,
            "longer_than_planned_us": excess / 1e3,
            "waited_for_ranks_us": within / 1e3,
        }
        yield bar(process, thread, name, operation.kind, start, end, **about)
        if done > end:
            yield bar(process, thread, f"{name}: sending rows", "sending", end, done)


def _name(operation: Operation) -> str:
    """F 3, B 3, I 0, E 3; the chunk behind it where that is not the first; of what works on a whole chunk the kind."""
    of_chunk = f"'{operation.chunk}" if operation.chunk else ""
    if operation.kind in (OperationKind.UNSHARD, OperationKind.REDUCE):
        return f"{operation.kind}{of_chunk}"
    return f"{operation.kind[0].upper()} {operation.microbatch}{of_chunk}"
