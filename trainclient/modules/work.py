"""Floating-point operations of modules, by the planner's formula."""

from torch import Tensor

from dataserver.planning.job.fields import ModelSize, linear_flops, pair_flops, seen_rows


def forward_flops(kind: str, size: ModelSize, offsets: Tensor) -> int:
    """Operations of a whole module's forward on a view.

    Args:
        kind: of the module: encoder, backbone or generator.
        size: its sizes.
        offsets: integers [n + 1], where each of the view's items begins, in patches or tokens; on the CPU.
    """
    lengths = [int(length) for length in offsets.diff().tolist()]
    seen, whole = seen_rows(kind, size), size.global_layers if size.window else size.layers
    pairs = whole * sum(length * length for length in lengths)
    pairs += (size.layers - whole) * sum(length * min(length, seen) for length in lengths)
    return linear_flops(kind, size) * sum(lengths) + pair_flops(kind, size) * pairs // size.layers
