"""A slow simulator that follows the definitions word by word, and random pipelines whose lists can be run."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from builders.operations import operations_of
from hypothesis import strategies as st

from dataserver.planning import I64
from dataserver.planning.simulation import Operation, OperationKind, Pipeline

F, B, I, *COLLECTIVES = OperationKind  # noqa: E741
Event = tuple[int, Operation]
"""An operation of a node."""


@dataclass(frozen=True)
class Definitions:
    """What a pipeline means: what each operation of each node takes, and what it waits for."""

    pipeline: Pipeline

    def duration(self, event: Event) -> int:
        node, operation = event
        if operation.kind in COLLECTIVES:
            return 0
        if operation.kind is I:
            assert self.pipeline.interaction_ns is not None
            return int(self.pipeline.interaction_ns[node, operation.microbatch])
        times = self.pipeline.forward_ns if operation.kind is F else self.pipeline.backward_ns
        return int(times[node * self.pipeline.num_chunks + operation.chunk, operation.microbatch])

    def group(self, number: int) -> range:
        size = self.pipeline.forward_ns.shape[1] // self.pipeline.num_batches
        return range(number * size, (number + 1) * size)

    def needs(self, event: Event, all_events: set[Event]) -> dict[Event, int]:
        """The events that must have ended, and how long before; the list's own order left aside."""
        node, operation = event
        found: dict[Event, int] = {}
        if operation.kind in COLLECTIVES:  # but for the list's order
            return found
        groups = range(self.pipeline.num_batches)
        if operation.kind is I:
            with_it = [n for n, o in all_events if o == operation]
            return {(n, o): 0 for n, o in all_events if n in with_it and o.kind is F and
                    o.microbatch in self.group(operation.microbatch)}  # fmt: skip
        if operation.kind is B:
            found[node, Operation(F, operation.microbatch, operation.chunk)] = 0
            interactions = [(node, Operation(I, g)) for g in groups if operation.microbatch in self.group(g)]
            found |= {i: 0 for i in interactions if i in all_events}
        chunks = self.pipeline.num_chunks
        for number, (microbatch, *ends) in enumerate(self.pipeline.edges.tolist()):
            source, target = ends if operation.kind is F else reversed(ends)
            if microbatch == operation.microbatch and target == node * chunks + operation.chunk:
                delay = 0 if self.pipeline.transfer_ns is None else int(self.pipeline.transfer_ns[number])
                event = source // chunks, Operation(operation.kind, microbatch, source % chunks)
                found[event] = max(delay, found.get(event, 0))
        return found

    def events(self) -> set[Event]:
        return {(n, o) for n, stage in enumerate(self.pipeline.stage) for o in self.pipeline.operations[int(stage)]}


def fixed_point(pipeline: Pipeline) -> dict[Event, tuple[int, int]]:
    """(start, end) as the least solution of 'not before any input is there', found by raising until all agree."""
    definitions = Definitions(pipeline)
    events = definitions.events()
    end = {event: definitions.duration(event) for event in events}
    needs = {event: definitions.needs(event, events) for event in events}
    for node, stage in enumerate(pipeline.stage):
        operations = pipeline.operations[int(stage)]
        for before, operation in pairwise(operations):
            needs[node, operation].setdefault((node, before), 0)
    changed = True
    while changed:
        changed = False
        for event in events:
            ready = max((end[e] + delay for e, delay in needs[event].items()), default=0)
            if ready + definitions.duration(event) > end[event]:
                end[event] = ready + definitions.duration(event)
                changed = True
    return {event: (end[event] - definitions.duration(event), end[event]) for event in events}


def peak_bytes(pipeline: Pipeline, times: dict[Event, tuple[int, int]], node: int) -> int:
    """Most memory that a node holds at any moment, from the times; no operation may take no time."""
    assert pipeline.activation_bytes is not None
    held = []
    for (n, operation), (start, end) in times.items():
        if n == node and operation.kind is F:
            back = times.get((n, Operation(B, operation.microbatch, operation.chunk)))
            size = int(pipeline.activation_bytes[n * pipeline.num_chunks + operation.chunk, operation.microbatch])
            held.append((start, end if back is None else back[1], size))
    return max((sum(size for begin, end, size in held if begin <= t < end) for t, _, _ in held), default=0)


@st.composite
def pipelines(draw: st.DrawFn, shortest: int = 0) -> Pipeline:
    """A list of its own for every node, in a random order that can be run; the first blocks may be frozen, collectives
    stand anywhere."""
    nodes, chunks, groups = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    microbatches = draw(st.integers(1, 3)) * max(groups, 1)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = random.permutation(nodes * chunks)
    edges = [
        (m, order[a], order[b])
        for m in range(microbatches) for b in range(len(order)) for a in range(b) if random.random() < 0.4
    ]  # fmt: skip

    def times(*shape: int) -> I64:
        return random.integers(shortest, 20, shape)

    bare = Pipeline(
        num_stages=nodes,
        stage=np.arange(nodes),
        forward_ns=times(nodes * chunks, microbatches),
        backward_ns=times(nodes * chunks, microbatches),
        edges=np.array(edges, np.int64).reshape(-1, 3),
        operations=[],
        num_chunks=chunks,
        transfer_ns=random.integers(0, 9, len(edges)) if random.random() < 0.7 else None,
        interaction_ns=times(nodes, groups) if groups else None,
        activation_bytes=random.integers(0, 100, (nodes * chunks, microbatches)),
    )
    frozen = order[: random.integers(0, len(order))] if random.random() < 0.3 else []
    drawn_kinds = COLLECTIVES if random.random() < 0.5 else []
    passes = [(b // chunks, b % chunks, m) for b in range(nodes * chunks) for m in range(microbatches)]
    events = {(n, Operation(F, m, c)) for n, c, m in passes}
    events |= {(n, Operation(B, m, c)) for n, c, m in passes if n * chunks + c not in frozen}
    events |= {(n, Operation(I, g)) for n in range(nodes) if random.random() < 0.5 for g in range(groups)}
    events |= {(n, Operation(k, 0, c)) for n in range(nodes) for c in range(chunks) for k in drawn_kinds}
    return replace_lists(bare, shuffled(bare, events, random))


def shuffled(pipeline: Pipeline, events: set[Event], random: np.random.Generator) -> list[list[Operation]]:
    """Run any event whose inputs are there, chosen by chance; each node's list is what it ran."""
    definitions = Definitions(pipeline)
    ranked = sorted(events, key=lambda e: (e[0], e[1].kind, e[1].microbatch, e[1].chunk))
    lists: list[list[Operation]] = [[] for _ in range(pipeline.num_stages)]
    waiting = {event: set(definitions.needs(event, events)) for event in ranked}
    while waiting:
        ready = [event for event, needs in waiting.items() if not needs & waiting.keys()]
        node, operation = ready[random.integers(len(ready))]
        lists[node].append(operation)
        del waiting[node, operation]
    return lists


def replace_lists(pipeline: Pipeline, lists: list[list[Operation]]) -> Pipeline:
    """The same pipeline with other lists."""
    fields = {name: getattr(pipeline, name) for name in Pipeline.__dataclass_fields__}
    return Pipeline(**(fields | {"operations": [*map(operations_of, lists)]}))
