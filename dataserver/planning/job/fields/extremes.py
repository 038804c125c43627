"""The most that the items of a step could come to, whatever the datasets hold; exact, in Python's integers."""

from dataserver.planning.job.fields.modules import ModuleSpec
from dataserver.planning.job.fields.stream import Stream
from dataserver.planning.job.fields.values import Modality, ModuleKind


def most_units(stream: Stream, module: ModuleSpec, sequences: int) -> int:
    """Tokens or patches that a module gets of so many sequences, padding included."""
    if module.holds_samples:
        return sequences * stream.seq_len
    images = 1  # of a sequence
    if module.kind is ModuleKind.ENCODER:
        if not module.padded:  # a patch takes its share of a token
            return sequences * stream.seq_len * stream.sizing.merge**2
        images = stream.seq_len // 3  # each takes a token and two more
    elif module.modality is not Modality.IMAGE and stream.packing.enabled:
        images = stream.seq_len // (stream.generation.query_tokens + 2)
    return sequences * max(1, images) * stream.sizing.max_patches


def most_forward_ns(stream: Stream, module: ModuleSpec, sequences: int) -> int:
    """Nanoseconds that a module's forward takes for so many sequences, beside the constant part of microbatches."""
    units, cost = most_units(stream, module, sequences), module.cost
    largest = stream.seq_len if module.holds_samples else stream.sizing.max_patches
    return units * cost.linear_ps // 1000 + units * largest * cost.quadratic_fs // 10**6
