"""Microbatches of one shape for the whole job, for compilers that want that: sequences as rows, the rest padding.

numpy alone. How large they are follows from the job: `execution.microbatch` rows of `stream.seq_len` tokens, and as
many patches as these tokens can stand for, or fewer where the encoder's `memory` says so, which no plan exceeds.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from trainclient.adapters.full_model import IGNORED_LABEL, FullModelMicrobatch, FullModelStream
from trainclient.stream.microbatch import Array
from trainclient.stream.positions import patch_positions


@dataclass(frozen=True, slots=True)
class PaddedShape:
    """What a microbatch has room for."""

    sequences: int
    tokens: int
    """Tokens of each sequence, padding included."""
    patches: int
    patch_bytes: int
    merge: int
    """Side of a block of patches that becomes one token."""

    @classmethod
    def of(cls, stream: FullModelStream) -> Self:
        """That of every microbatch of a stream; no patches in a job without encoder."""
        spec, encoder = stream.job.spec, stream.encoder
        sequences, tokens, sizing = spec.execution.microbatch, spec.stream.seq_len, spec.stream.sizing
        if sizing.tiles is not None:
            raise ValueError(
                "sizing.rule is tiles, and padded tensors have an image as one grid; take another rule, or iterate "
                "over the stream's own tensors"
            )
        block = sizing.merge**2
        patches = 0 if encoder is None else sequences * tokens * block
        if encoder is not None and encoder.memory is not None:
            patches = min(patches, encoder.memory.units // block * block)
        return cls(sequences, tokens, patches, sizing.patch**2 * 3, sizing.merge)

    def around(self, microbatch: FullModelMicrobatch) -> Self:
        """That of one microbatch alone, as modules that are `padded` are planned: no more rows and patches than it has,
        and rows as long as the longest of its sequences."""
        lengths, patches = np.diff(microbatch.tensors["cu_sequences"]), len(microbatch.pictures[0])
        return replace(self, sequences=len(lengths), tokens=int(lengths.max(initial=0)), patches=patches)

    def pad(self, microbatch: FullModelMicrobatch) -> dict[str, Array]:
        """The tensors of a microbatch, each of the same shape every time. With M sequences of S tokens and P patches:

        - token_ids, labels (-100 is ignored), position_ids, int32 [M, S], and sample_ids, which count from 1 and are 0
          where there is padding: no attention between different ones;
        - text_tokens, int64 []: the denominator of the step's loss; step, int64 []; last_of_step, bool [];
        - with room for patches: patches, uint8 [P, patch_bytes], patch_positions, int32 [P, 2]: row and column;
          image_ids, int32 [P], as sample_ids; and embedding_slots, int32 [P / merge^2]: which of the M * S tokens each
          block of patches replaces, M * S for padding.

        Raises:
            ValueError: it has more than there is room for.
        """
        tensors, slots = microbatch.tensors, self.slots(microbatch)
        samples = np.diff(tensors["cu_lengths"])
        found = {
            "token_ids": self.rows(tensors["token_ids"], slots),
            "labels": self.rows(tensors["labels"], slots, IGNORED_LABEL),
            "position_ids": self.rows(tensors["position_ids"], slots),
            "sample_ids": self.rows(np.repeat(np.arange(1, len(samples) + 1), samples), slots),
        }
        found["text_tokens"] = np.array(microbatch.backbone.text_tokens, np.int64)
        found["step"] = np.array(microbatch.backbone.step, np.int64)
        found["last_of_step"] = np.array(microbatch.backbone.last_of_step)
        return found | (self._images(tensors, slots) if self.patches else {})

    def slots(self, microbatch: FullModelMicrobatch) -> Array:
        """Place of each token of a microbatch among the M * S of its rows, int64 [T]; ValueError if there is none."""
        lengths = np.diff(microbatch.tensors["cu_sequences"])
        self.require_room("sequences", len(lengths), self.sequences)
        self.require_room("tokens in a sequence", int(lengths.max(initial=0)), self.tokens)
        return np.concatenate([np.arange(n) + row * self.tokens for row, n in enumerate(lengths.tolist())])

    def rows(self, values: Array, slots: Array, padding: int = 0) -> Array:
        """Values of tokens, [T, ...], in the rows: int32 [M, S, ...]."""
        found = np.full((self.sequences * self.tokens, *values.shape[1:]), padding, np.int32)
        found[slots] = values
        return found.reshape(self.sequences, self.tokens, *values.shape[1:])

    def _images(self, tensors: dict[str, Array], slots: Array) -> dict[str, Array]:
        grid, count, block = tensors["grid"], len(tensors["patches"]), self.merge**2
        self.require_room("patches", count, self.patches)
        found: dict[str, Array] = {
            "patches": np.zeros((self.patches, self.patch_bytes), np.uint8),
            "patch_positions": np.zeros((self.patches, 2), np.int32),
            "image_ids": np.zeros(self.patches, np.int32),
            "embedding_slots": np.full(self.patches // block, self.sequences * self.tokens, np.int32),
        }
        found["patches"][:count] = tensors["patches"]
        found["patch_positions"][:count] = patch_positions(grid, self.merge)
        found["image_ids"][:count] = np.repeat(np.arange(1, len(grid) + 1), grid.prod(1))
        found["embedding_slots"][: count // block] = slots[tensors["embedding_slots"]]
        return found

    @staticmethod
    def require_room(what: str, found: int, room: int) -> None:
        """Raise ValueError if there is more of something than there is room for."""
        if found > room:
            raise ValueError(
                f"a microbatch has {found} {what}, and batches of one shape have room for {room}: read it with the job "
                "that the shape was made for"
            )
