"""The operations of all nodes as one graph: which wait for which."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64, Bool, yield_point
from dataserver.planning.simulation.operations import BACKWARD, FORWARD, INTERACTION, Operations
from dataserver.planning.simulation.pipeline import Pipeline


class PipelineDeadlockError(RuntimeError):
    """Operation lists that wait for each other."""


@dataclass(frozen=True, slots=True)
class OperationGraph:
    """What n nodes compute, and g gates: gate k opens when all forwards of contrastive batch k are done.

    Collectives take no time and keep nobody waiting, so they are left out. Operation i of node v has the number
    v * ops + i, with ops the length of the longest list; gates come behind.
    """

    cell: I64
    """int64 [n, ops]: what each operation is, an index into the node's row of `cell_values`; -1 behind the list."""
    offsets: I64
    """int64 [n * ops + g + 1]: of the operations that each one releases."""
    after: I64
    """int64 [offsets[-1]]: those operations, beside the next in the list."""
    delay_ns: I64
    """int64 [offsets[-1]]: transfer to them."""
    waits: I64
    """int64 [n * ops + g]: operations that each one waits for, the one before it in the list included; -1 behind it."""

    @property
    def follows(self) -> Bool:
        """bool [n * ops + g]: whether the list goes on behind the operation."""
        found = np.zeros(self.cell.shape, np.bool_)
        found[:, :-1] = self.cell[:, 1:] >= 0
        return np.concatenate([found.ravel(), np.zeros(len(self.waits) - self.cell.size, np.bool_)])

    def spread(self, values: I64) -> I64:
        """The value of each operation by its cell, 0 for gates and behind lists. int64 [n * ops + g].

        `values` is int64 [n, cells], see `cell_values`.
        """
        found = np.zeros(len(self.waits), np.int64)
        listed = np.flatnonzero(self.cell.ravel() >= 0)
        found[listed] = values[listed // max(self.cell.shape[1], 1), self.cell.ravel()[listed]]
        return found


def cell_values(pipeline: Pipeline, forward: I64, backward: I64, interaction: I64 | None) -> I64:
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
    stage_cells = [_cells(pipeline, s, operations) for s, operations in enumerate(pipeline.operations)]
    ops, nodes, batches = max((len(s) for s in stage_cells), default=0), len(pipeline.stage), pipeline.num_batches
    cells = np.full((pipeline.num_stages, ops), -1, np.int64)
    width = 2 * pipeline.num_chunks * pipeline.forward_ns.shape[1] + batches
    position = np.full((pipeline.num_stages, width), -1, np.int64)
    for stage, listed in enumerate(stage_cells):
        yield_point()
        cells[stage, : len(listed)] = listed
        position[stage, listed] = np.arange(len(listed))
    _check_lists(pipeline, position)
    yield_point()
    cell, place = cells[pipeline.stage], position[pipeline.stage]
    number = np.where(place >= 0, place + ops * np.arange(nodes)[:, None], -1)
    yield_point()
    found = _along_edges(pipeline, number), _through_gates(pipeline, number, nodes * ops)
    before, after, delay = (np.concatenate(column) for column in zip(*found, strict=True))
    yield_point()
    order = np.argsort(before, kind="stable")
    size = nodes * ops + batches
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(before, minlength=size))])
    in_list = np.where(cell >= 0, np.arange(ops) > 0, -1).ravel()
    waits = np.bincount(after, minlength=size) + np.concatenate([in_list, np.zeros(batches, np.int64)])
    return OperationGraph(cell, offsets, after[order], delay[order], waits)


def _cells(pipeline: Pipeline, stage: int, operations: Operations) -> I64:
    """The cell of each operation of one list, without collectives."""
    microbatches, chunks = pipeline.forward_ns.shape[1], pipeline.num_chunks
    listed = operations.computing
    interacts = listed.kind == INTERACTION
    limit = np.where(interacts, pipeline.num_batches, microbatches)
    unknown = (listed.microbatch < 0) | (listed.microbatch >= limit) | (listed.chunk < 0) | (listed.chunk >= chunks)
    if unknown.any():
        raise ValueError(
            f"stage {stage} lists {listed[int(unknown.argmax())]}; the pipeline has {microbatches} microbatches, "
            f"{chunks} chunks and {pipeline.num_batches} contrastive batches"
        )
    cell: I64 = (listed.kind * chunks + np.where(interacts, 0, listed.chunk)) * microbatches + listed.microbatch
    counts = np.bincount(cell, minlength=1)
    if counts.max() > 1:
        raise ValueError(f"stage {stage} lists {listed[int(np.argmax(counts[cell] > 1))]} twice; once is required")
    return cell


def _check_lists(pipeline: Pipeline, position: I64) -> None:
    """A backward comes behind its forward; an interaction between the forwards and backwards of its batch.

    Args:
        pipeline: whose lists they are.
        position: int64 [stages, cells], the place of each operation in its list, -1 for none.
    """
    stages, microbatches, chunks = len(position), pipeline.forward_ns.shape[1], pipeline.num_chunks
    listed = position[:, : 2 * chunks * microbatches].reshape(stages, 2, chunks, microbatches)
    forward, backward = listed[:, FORWARD], listed[:, BACKWARD]
    wrong = (backward >= 0) & ((forward < 0) | (backward < forward))
    if wrong.any():
        stage, chunk, microbatch = np.argwhere(wrong)[0].tolist()
        raise PipelineDeadlockError(
            f"stage {stage} lists the backward of microbatch {microbatch}, chunk {chunk}, without its forward before it"
        )
    for number in range(pipeline.num_batches):
        size = microbatches // pipeline.num_batches
        mine = slice(number * size, (number + 1) * size)
        interaction = position[:, 2 * chunks * microbatches + number]
        last = forward[:, :, mine].reshape(stages, -1).max(axis=1, initial=-1)
        returned = np.where(backward >= 0, backward, position.shape[1])[:, :, mine].reshape(stages, -1)
        early = (interaction >= 0) & ((last > interaction) | (returned.min(axis=1) < interaction))
        if early.any():
            raise PipelineDeadlockError(
                f"stage {int(early.argmax())} lists the interaction of contrastive batch {number} before one of its "
                f"forwards or behind one of its backwards; it needs all of microbatches {mine.start} to {mine.stop - 1}"
            )


def _along_edges(pipeline: Pipeline, number: I64) -> tuple[I64, I64, I64]:
    """Forwards wait for those of their sources, backwards for those of their targets.

    The operations that come first, those that wait for them, and the delays between them. int64 [d] each.
    """
    microbatch, source, target = pipeline.edges.T
    microbatches = pipeline.forward_ns.shape[1]

    def at(kind: int, block: I64) -> I64:
        node, chunk = np.divmod(block, pipeline.num_chunks)
        found: I64 = number[node, (kind * pipeline.num_chunks + chunk) * microbatches + microbatch]
        return found

    before = np.concatenate([at(FORWARD, source), at(BACKWARD, target)])
    after = np.concatenate([at(FORWARD, target), at(BACKWARD, source)])
    used = after >= 0
    missing = used & (before < 0)
    if missing.any():
        edge = pipeline.edges[int(missing.argmax()) % len(source)].tolist()
        raise ValueError(
            f"block {edge[1]} feeds block {edge[2]} in microbatch {edge[0]}, but only one of them lists that pass; "
            "both ends of an edge must run it"
        )
    return before[used], after[used], np.tile(pipeline.delay_ns, 2)[used]


def _through_gates(pipeline: Pipeline, number: I64, first_gate: int) -> tuple[I64, I64, I64]:
    """A batch's gate waits for its forwards wherever its interaction is listed; the interactions wait for the gate."""
    microbatches = pipeline.forward_ns.shape[1]
    passes = pipeline.num_chunks * microbatches
    before, after = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for batch in range(pipeline.num_batches):
        size = microbatches // pipeline.num_batches
        nodes = np.flatnonzero(number[:, 2 * passes + batch] >= 0)
        forwards = number[nodes, :passes].reshape(len(nodes), pipeline.num_chunks, microbatches)
        mine = forwards[:, :, batch * size : (batch + 1) * size].ravel()
        mine = mine[mine >= 0]
        gate = np.full(max(len(mine), len(nodes)), first_gate + batch)
        before += [mine, gate[: len(nodes)]]
        after += [gate[: len(mine)], number[nodes, 2 * passes + batch]]
    pairs = np.concatenate(before), np.concatenate(after)
    return *pairs, np.zeros_like(pairs[0])
