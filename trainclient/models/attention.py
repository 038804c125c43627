"""Attention over packed segments: many sequences or images back to back that do not see each other."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from trainclient.models.checks import require_integers, require_shape
from trainclient.torch_compat import VarlenKernel, varlen_kernel
from trainclient.upload import upload


class HeadSharing(Protocol):
    """Ranks that have a run of the rows of packed segments each, and attend with a part of the heads each."""

    num_rows: int
    """Number of rows of all ranks together."""

    def to_heads(self, rows: Tensor) -> Callable[[], Tensor]:
        """Begin to hand on this rank's rows of all heads, [rows, heads, head_dim]; what waits for all rows of its own.

        Others may begin before it has been waited for.
        """

    def to_rows(self, mixed: Tensor) -> Tensor:
        """Exchange all rows of this rank's heads, [num_rows, heads, head_dim], for its rows of all heads."""


@dataclass(slots=True, eq=False)  # not frozen: of a frozen one the compiler guards all fields, the lengths too
class Segments:
    """Where the segments of a packed tensor lie. Made once per forward pass, used by every layer."""

    offsets: Tensor
    """int32 [n + 1] on the device of the computation: segment i is rows offsets[i] to offsets[i + 1]."""
    lengths: tuple[int, ...]
    """Rows of each segment; zero is allowed."""
    longest: int
    """Rows of the longest segment."""
    sharing: HeadSharing | None = None
    """Who has the rows, where they are dealt to several ranks."""
    blocks: Tensor | None = None
    """Integers [rows] on the device of the computation, the block of each row, or -1: in causal attention the rows of a
    block see each other both ways. Given before the first layer."""
    _masks: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """What `masks` made, by the window."""

    @classmethod
    def from_offsets(
        cls, name: str, offsets: Tensor, rows: int, device: torch.device, sharing: HeadSharing | None = None
    ) -> Self:
        """Check cumulative lengths from a view.

        Args:
            name: what the tensor is called in an error.
            offsets: integers [n + 1], from 0 to `rows`, never falling. On the CPU this costs no synchronisation.
            rows: rows of the packed tensor.
            device: device of the computation.
            sharing: who has the rows, where they are dealt to several ranks.

        Raises:
            ValueError: the offsets do not partition the rows.
        """
        require_integers(name, offsets)
        require_shape(name, offsets, -1)
        values = offsets.tolist()
        if not values or values[0] != 0 or values[-1] != rows:
            ends = f"from {values[0]} to {values[-1]}" if values else "are empty"
            raise ValueError(f"{name} run {ends}; they must run from 0 to the number of rows, {rows}")
        lengths = tuple(end - start for start, end in pairwise(values))
        if any(length < 0 for length in lengths):
            raise ValueError(f"{name} fall at entry {next(i for i, n in enumerate(lengths) if n < 0) + 1}")
        return cls(upload(offsets, device, torch.int32), lengths, max(lengths, default=0), sharing)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def masks(self, window: int) -> tuple[Tensor, ...]:
        """Which rows of each segment see which in causal attention, bool [rows, rows]: one for all layers, which
        otherwise each save their own for the way backwards.

        Args:
            window: as in `packed_attention`.
        """
        if window not in self._masks:
            several = (None,) * len(self) if self.blocks is None else torch.split(self.blocks, list(self.lengths))
            self._masks[window] = tuple(
                causal_mask(length, window, blocks, self.offsets.device)
                for length, blocks in zip(self.lengths, several, strict=True)
            )
        return self._masks[window]

    def row_segments(self) -> Tensor:
        """The segment of each row, int64 [rows]."""
        device = self.offsets.device
        number = torch.arange(len(self), device=device)
        return number.repeat_interleave(self.offsets.diff(), output_size=sum(self.lengths))


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    key_segments: Segments | None = None,
    *,
    causal: bool = False,
    window: int = 0,
) -> Tensor:
    """Scaled dot product attention of each segment's queries to the same segment's keys.

    Half precision on CUDA runs as one variable-length flash attention call; everything else (CPU, float32, float64,
    blocks of rows that see each other both ways) runs segment by segment, so that a segment's result cannot depend on
    its neighbours.

    Args:
        query: [T, heads, head_dim].
        key: [S, groups, head_dim]; heads must be a multiple of groups (grouped-query attention).
        value: [S, groups, head_dim].
        segments: partition of the T rows.
        key_segments: partition of the S rows with as many segments (cross attention); by default `segments`.
        causal: a row attends to itself and the rows before it, and to all of its block; only without `key_segments`.
        window: a row attends to no row that lies `window` rows or more before it; 0: as far as its segment goes. Only
            with `causal`.

    Returns:
        [T, heads, head_dim]. Queries of a segment without keys get zeros.

    Raises:
        ValueError: the partitions do not match each other.
    """
    keys = _key_segments(segments, key_segments, causal=causal)
    if query.shape[0] == 0 or key.shape[0] == 0:
        return _connected_zeros(query, key, value)
    two_way = causal and segments.blocks is not None
    if flash_applies(query.device, query.dtype, query.shape[-1]) and not two_way:
        return _flash_attention(varlen_kernel(), query, key, value, segments, keys, causal=causal, window=window)
    partitions = ((query, segments), (key, keys), (value, keys))
    parts = zip(*(torch.split(rows, list(by.lengths)) for rows, by in partitions), strict=True)
    if not two_way and not window:
        return torch.cat([_one_segment(q, k, v, causal=causal) for q, k, v in parts])
    masks = segments.masks(window)
    return torch.cat(
        [_one_segment(q, k, v, causal=False, mask=mask) for (q, k, v), mask in zip(parts, masks, strict=True)]
    )


def causal_mask(rows: int, window: int, blocks: Tensor | None, device: torch.device) -> Tensor:
    """Which rows of a segment see which, bool [rows, rows]: themselves and those before, at most `window` of them.

    Args:
        rows: of the segment.
        window: as in `packed_attention`.
        blocks: integers [rows]; rows of the same block, unless it is -1, see each other also ahead.
        device: where it is needed.
    """
    number = torch.arange(rows, device=device)
    back = number[:, None] - number
    sees = back >= 0
    if blocks is not None:
        sees |= (blocks[:, None] == blocks) & (blocks >= 0)
    return sees & (back < window) if window else sees


@functools.cache  # code is compiled anew for each other function that it calls
def traceable_attention() -> Callable[..., Tensor]:
    """`packed_attention` where `flash_applies`: one code for any number of segments, so it can be compiled."""
    kernel = varlen_kernel()

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        key_segments: Segments | None = None,
        *,
        causal: bool = False,
        window: int = 0,
    ) -> Tensor:
        keys = _key_segments(segments, key_segments, causal=causal)
        if query.shape[0] == 0 or key.shape[0] == 0:
            return _connected_zeros(query, key, value)
        return _flash_attention(kernel, query, key, value, segments, keys, causal=causal, window=window)

    return attend


def _key_segments(segments: Segments, key_segments: Segments | None, *, causal: bool) -> Segments:
    if causal and key_segments is not None:
        raise ValueError("causal attention with key_segments is not defined; leave one of them out")
    keys = segments if key_segments is None else key_segments
    if len(keys) != len(segments):
        raise ValueError(f"{len(segments)} query segments meet {len(keys)} key segments; the counts must agree")
    return keys


def _connected_zeros(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What no rows or no keys give: a microbatch without images must still reach every parameter backwards."""
    return 0 * query + 0 * (key.sum() + value.sum())


def shared_attention(
    heads: Iterable[Tensor], segments: Segments, sharing: HeadSharing, *, causal: bool, window: int = 0
) -> Tensor:
    """`packed_attention` where ranks share the rows of the segments; all of them call this together.

    Args:
        heads: query, key and value of this rank's rows. Each is on its way to the others before the next is asked for.
        segments: partition of the rows of all ranks.
        sharing: the ranks.
        causal: as in `packed_attention`.
        window: as in `packed_attention`.

    Returns:
        Of this rank's rows, [rows, heads, head_dim].
    """
    query, key, value = [sharing.to_heads(rows) for rows in heads]
    return sharing.to_rows(packed_attention(query(), key(), value(), segments, causal=causal, window=window))


def _one_segment(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None = None) -> Tensor:
    if query.shape[0] == 0 or key.shape[0] == 0:
        return torch.zeros_like(query)
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


def flash_applies(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash kernel takes such tensors: half precision on Ampere or later, head_dim <= 256 in eights."""
    return (
        device.type == "cuda"
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= 256
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _flash_attention(
    kernel: VarlenKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    keys: Segments,
    *,
    causal: bool,
    window: int,
) -> Tensor:
    seen = (window - 1 if window else -1, 0) if causal else (-1, -1)
    return kernel(query, key, value, segments.offsets, keys.offsets, segments.longest, keys.longest, seen)
