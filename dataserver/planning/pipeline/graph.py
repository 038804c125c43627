"""The operations of all nodes as one graph: which wait for which."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataserver.planning.pipeline.layout import Pipeline
from dataserver.planning.pipeline.operations import Operation, OperationKind
from dataserver.planning.samples import I64, Bool

_KINDS = {kind: number for number, kind in enumerate(OperationKind)}
_FORWARD, _BACKWARD, _INTERACTION = range(3)


class PipelineDeadlockError(RuntimeError):
    """Operation lists that wait for each other."""


@dataclass(frozen=True, slots=True)
class OperationGraph:
    """The operations of n nodes, and g gates: gate k opens when all forwards of contrastive group k are done.

    Operation i of node v has the number v * ops + i, with ops the length of the longest list; gates come behind.
    """

    slot: I64
    """int64 [n, ops]: what each operation is, an index into the node's row of `slot_values`; -1 behind the list."""
    offsets: I64
    """int64 [n * ops + g + 1]: of the operations that each one lets go on."""
    after: I64
    """int64 [offsets[-1]]: those operations, beside the next in the list."""
    delay_ns: I64
    """int64 [offsets[-1]]: transfer to them."""
    waits: I64
    """int64 [n * ops + g]: operations that each one waits for, the one before it in the list included; -1 behind it."""

    @property
    def follows(self) -> Bool:
        """bool [n * ops + g]: whether the list goes on behind the operation."""
        found = np.zeros(self.slot.shape, np.bool_)
        found[:, :-1] = self.slot[:, 1:] >= 0
        return np.concatenate([found.ravel(), np.zeros(len(self.waits) - self.slot.size, np.bool_)])

    def spread(self, values: I64, blank: int = 0) -> I64:
        """The value of each operation by its slot, `blank` for gates and behind lists. int64 [n * ops + g].

        `values` is int64 [n, slots], see `slot_values`.
        """
        found = np.full(len(self.waits), blank, np.int64)
        listed = np.flatnonzero(self.slot.ravel() >= 0)
        found[listed] = values[listed // max(self.slot.shape[1], 1), self.slot.ravel()[listed]]
        return found


def slot_values(pipeline: Pipeline, forward: I64, backward: I64, interaction: I64 | None) -> I64:
    """One row for each node: forward values of its (chunk, microbatch), backward values, interaction values."""
    shape = len(pipeline.stage), pipeline.num_chunks * pipeline.forward_ns.shape[1]
    parts = [forward.reshape(shape), backward.reshape(shape)]
    return np.concatenate(parts if interaction is None else [*parts, interaction], axis=1)


def build_graph(pipeline: Pipeline) -> OperationGraph:
    """Find what every operation waits for.

    Raises:
        ValueError: the pipeline's arrays do not fit each other, or an operation is missing, unknown or listed twice.
        PipelineDeadlockError: a list runs a backward before what it needs.
    """
    pipeline.check()
    held = pipeline.in_flight
    generated = pipeline.operations is None and held is not None and held.min(initial=1) > 0
    if generated and held is not None and pipeline.num_chunks == 1:
        stage_slots = [_alternating_slots(number, pipeline.forward_ns.shape[1]) for number in held.tolist()]
    else:
        stage_slots = [_slots(pipeline, s, operations) for s, operations in enumerate(pipeline.lists)]
    ops, nodes, groups = max((len(s) for s in stage_slots), default=0), len(pipeline.stage), pipeline.num_groups
    slots = np.full((pipeline.num_stages, ops), -1, np.int64)
    width = 2 * pipeline.num_chunks * pipeline.forward_ns.shape[1] + groups
    position = np.full((pipeline.num_stages, width), -1, np.int64)
    for stage, listed in enumerate(stage_slots):
        slots[stage, : len(listed)] = listed
        position[stage, listed] = np.arange(len(listed))
        if not generated:
            _check_list(pipeline, stage, position[stage])
    slot, place = slots[pipeline.stage], position[pipeline.stage]
    number = np.where(place >= 0, place + ops * np.arange(nodes)[:, None], -1)
    before, after, delay = _dependencies(pipeline, number, nodes * ops)
    order = np.argsort(before, kind="stable")
    size = nodes * ops + groups
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(before, minlength=size))])
    in_list = np.where(slot >= 0, np.arange(ops) > 0, -1).ravel()
    waits = np.bincount(after, minlength=size) + np.concatenate([in_list, np.zeros(groups, np.int64)])
    return OperationGraph(slot, offsets, after[order], delay[order], waits)


def _slots(pipeline: Pipeline, stage: int, operations: Sequence[Operation]) -> I64:
    """The slot of each operation of one list."""
    microbatches = pipeline.forward_ns.shape[1]
    rows = np.array([(_KINDS[o.kind], o.chunk, o.microbatch) for o in operations], np.int64).reshape(-1, 3)
    kind, chunk, microbatch = rows.T
    limit = np.where(kind == _INTERACTION, pipeline.num_groups, microbatches)
    unknown = (microbatch < 0) | (microbatch >= limit) | (chunk < 0) | (chunk >= pipeline.num_chunks)
    if unknown.any():
        raise ValueError(
            f"stage {stage} lists {operations[int(unknown.argmax())]}; the pipeline has {microbatches} microbatches, "
            f"{pipeline.num_chunks} chunks and {pipeline.num_groups} contrastive groups"
        )
    slot: I64 = (kind * pipeline.num_chunks + np.where(kind == _INTERACTION, 0, chunk)) * microbatches + microbatch
    counts = np.bincount(slot, minlength=1)
    if counts.max() > 1:
        raise ValueError(f"stage {stage} lists {operations[int(np.argmax(counts[slot] > 1))]} twice; once is required")
    return slot


def _alternating_slots(in_flight: int, num_microbatches: int) -> I64:
    """The slots of `stage_operations`, without making the operations; for stages of one chunk."""
    forward = np.arange(num_microbatches)
    warmup = min(in_flight - 1, num_microbatches)
    steady = num_microbatches - warmup
    slots = np.empty(2 * num_microbatches, np.int64)
    slots[:warmup] = forward[:warmup]
    slots[warmup : warmup + 2 * steady : 2] = forward[warmup:]
    slots[warmup + 1 : warmup + 2 * steady : 2] = num_microbatches + forward[:steady]
    slots[warmup + 2 * steady :] = num_microbatches + forward[steady:]
    return slots


def _check_list(pipeline: Pipeline, stage: int, position: I64) -> None:
    """A backward comes behind its forward; an interaction between the forwards and backwards of its group."""
    microbatches = pipeline.forward_ns.shape[1]
    passes = pipeline.num_chunks * microbatches
    forward, backward = position[: 2 * passes].reshape(2, pipeline.num_chunks, microbatches)
    wrong = (backward >= 0) & ((forward < 0) | (backward < forward))
    if wrong.any():
        chunk, microbatch = np.argwhere(wrong)[0].tolist()
        raise PipelineDeadlockError(
            f"stage {stage} lists the backward of microbatch {microbatch}, chunk {chunk}, without its forward before it"
        )
    for group, interaction in enumerate(position[2 * passes :].tolist()):
        size = microbatches // pipeline.num_groups
        mine = slice(group * size, (group + 1) * size)
        backwards = backward[:, mine][backward[:, mine] >= 0]
        early = forward[:, mine].max() > interaction or backwards.min(initial=interaction) < interaction
        if interaction >= 0 and early:
            raise PipelineDeadlockError(
                f"stage {stage} lists the interaction of group {group} before one of its forwards or behind one of its "
                f"backwards; it needs all of microbatches {mine.start} to {mine.stop - 1}"
            )


def _dependencies(pipeline: Pipeline, number: I64, first_gate: int) -> tuple[I64, I64, I64]:
    """Pairs of operations of which the second waits for the first, and the delays between them. int64 [d] each."""
    edges, gates = _along_edges(pipeline, number), _through_gates(pipeline, number, first_gate)
    before, after, delay = (np.concatenate(column) for column in zip(edges, gates, strict=True))
    return before, after, delay


def _along_edges(pipeline: Pipeline, number: I64) -> tuple[I64, I64, I64]:
    """Forwards wait for those of their sources, backwards for those of their targets."""
    microbatch, source, target = pipeline.edges.T
    microbatches = pipeline.forward_ns.shape[1]
    delay = np.zeros(len(source), np.int64) if pipeline.transfer_ns is None else pipeline.transfer_ns

    def at(kind: int, block: I64) -> I64:
        node, chunk = np.divmod(block, pipeline.num_chunks)
        found: I64 = number[node, (kind * pipeline.num_chunks + chunk) * microbatches + microbatch]
        return found

    before = np.concatenate([at(_FORWARD, source), at(_BACKWARD, target)])
    after = np.concatenate([at(_FORWARD, target), at(_BACKWARD, source)])
    used = after >= 0
    missing = used & (before < 0)
    if missing.any():
        edge = pipeline.edges[int(missing.argmax()) % len(source)].tolist()
        raise ValueError(
            f"block {edge[1]} feeds block {edge[2]} in microbatch {edge[0]}, but only one of them lists that pass; "
            "both ends of an edge must run it"
        )
    return before[used], after[used], np.tile(delay, 2)[used]


def _through_gates(pipeline: Pipeline, number: I64, first_gate: int) -> tuple[I64, I64, I64]:
    """A group's gate waits for its forwards wherever its interaction is listed; the interactions wait for the gate."""
    microbatches = pipeline.forward_ns.shape[1]
    passes = pipeline.num_chunks * microbatches
    before, after = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for group in range(pipeline.num_groups):
        size = microbatches // pipeline.num_groups
        nodes = np.flatnonzero(number[:, 2 * passes + group] >= 0)
        forwards = number[nodes, :passes].reshape(len(nodes), pipeline.num_chunks, microbatches)
        mine = forwards[:, :, group * size : (group + 1) * size].ravel()
        mine = mine[mine >= 0]
        gate = np.full(max(len(mine), len(nodes)), first_gate + group)
        before += [mine, gate[: len(nodes)]]
        after += [gate[: len(mine)], number[nodes, 2 * passes + group]]
    pairs = np.concatenate(before), np.concatenate(after)
    return *pairs, np.zeros_like(pairs[0])
