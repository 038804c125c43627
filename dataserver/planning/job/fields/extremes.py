"""The most that the items of a step could come to, whatever the datasets hold; exact, in Python's integers."""

from dataserver.planning.job.fields.audio import AudioSizing
from dataserver.planning.job.fields.modules import ModuleSpec
from dataserver.planning.job.fields.stream import Stream
from dataserver.planning.job.fields.values import Modality, ModuleKind


def most_units(stream: Stream, module: ModuleSpec, sequences: int) -> int:
    """Tokens or patches that a module gets of so many sequences, padding included."""
    if module.holds_samples:
        return sequences * stream.seq_len
    if module.reads is Modality.AUDIO:
        return sequences * _most_positions(stream, module)
    if module.reads is Modality.VIDEO:  # a patch takes its share of a token
        return sequences * stream.seq_len * stream.sizing.merge**2
    images = 1  # of a sequence
    if module.kind is ModuleKind.ENCODER:
        if not module.padded:  # a patch takes its share of a token
            tiles = stream.sizing.tiles
            parts = 1 if tiles is None else tiles.most_parts(stream.sizing.side or 1)  # one of them has its tokens
            return sequences * stream.seq_len * stream.sizing.merge**2 * parts
        images = stream.seq_len // 3  # each takes a token and two more
    elif module.modality is not Modality.IMAGE and stream.packing.enabled:
        images = stream.seq_len // (stream.generation.query_tokens + 2)
    return sequences * max(1, images) * stream.sizing.max_patches


def _most_positions(stream: Stream, module: ModuleSpec) -> int:
    """Positions of the clips of one sequence, padding included: each clip takes a token and two more."""
    audio = _audio(stream)
    most = stream.seq_len // 3 * audio.max_frames
    return most if module.padded else min(most, 2 * stream.seq_len * audio.merge)


def _audio(stream: Stream) -> AudioSizing:
    return stream.sizing.audio or AudioSizing()


def most_forward_ns(stream: Stream, module: ModuleSpec, sequences: int) -> int:
    """Nanoseconds that a module's forward takes for so many sequences, beside the constant part of microbatches."""
    units, cost = most_units(stream, module, sequences), module.cost
    largest = stream.seq_len if module.holds_samples else stream.sizing.max_patches
    if module.reads is Modality.AUDIO:
        largest = _audio(stream).max_frames
    if module.reads is Modality.VIDEO:
        largest = stream.sizing.of_frames.max_patches
    seen = largest if cost.window is None else min(largest, cost.window)
    return units * cost.linear_ps // 1000 + units * seen * cost.quadratic_fs // 10**6
