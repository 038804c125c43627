"""Megatron-LM's and Megatron-Bridge's external data iterators (`dataloader_type="external"`) over the stream.

    batches = MegatronBatches(stream, modality="images", encoder="vit", image_token=290)
    iterator = ServedIterator(
        stream, batches, num_microbatches=get_num_microbatches(), start_step=args.iteration, load=folder, save=folder
    )

One batch is a microbatch of this rank as one packed sequence (thd) of constant length. Megatron updates behind a
constant number of microbatches; a step of fewer ends with such that are nothing but padding. What a checkpoint needs is
the number of updates, which Megatron keeps (`train_state.step`, `args.iteration`), whatever the number of ranks. Of
which stream they were, a file beside its checkpoints says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainclient.adapters.padded import PaddedShape
from trainclient.adapters.qwen2_vl import MEAN, STD, Qwen2VLInputs
from trainclient.adapters.state_file import read_state, write_state
from trainclient.adapters.versions import require
from trainclient.adapters.whole_rank import IGNORED_LABEL, WholeMicrobatch, WholeRankStream

require("megatron-core", "0.16", "0.20")
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

Batch = dict[str, Any]


@dataclass(frozen=True)
class MegatronBatches:
    """Makes batches of microbatches of L = `execution.microbatch` x `stream.seq_len` tokens.

    All have labels and position_ids, int64 [1, L], loss_mask, float32 [1, L], and attention_mask. Without `modality`
    they are those of an LLM: tokens, int64 [1, L], and cu_seqlens, int32 [1, n], its length as cu_seqlens_argmin,
    max_seqlen, int32 [1]. With one they are arguments of a MimoModel: input_ids, packing_kwargs (of PackedSeqParams)
    and modality_inputs.
    """

    stream: WholeRankStream
    modality: str | None = None
    """Name of the modality's submodules."""
    encoder: str = "encoder"
    """Name of the encoder within them."""
    image_token: int = 0
    """Id of the tokens that stand for images (`special_token_ids`)."""
    dense_mask: bool = False
    """Whether samples are kept apart by attention_mask, bool [1, 1, L, L], True where nothing is seen, instead of
    cu_seqlens: for attention that knows no thd."""
    image_mean: tuple[float, ...] = MEAN
    image_std: tuple[float, ...] = STD
    shape: PaddedShape = field(init=False)

    def __post_init__(self) -> None:
        if (self.stream.encoder is None) is not (self.modality is None):
            raise ValueError(
                f"the job's encoder is {self.stream.encoder and self.stream.encoder.name}, and modality is "
                f"{self.modality}: name the modality of a MimoModel where the job has an encoder, and none elsewhere"
            )
        object.__setattr__(self, "shape", PaddedShape.of(self.stream))

    def __call__(self, microbatch: WholeMicrobatch) -> Batch:
        """The batch of a microbatch; without images it has no modality_inputs."""
        tensors = microbatch.tensors
        ids = tensors["token_ids"].copy()
        ids[tensors["embedding_slots"]] = self.image_token
        found = self._tokens(ids, tensors["position_ids"], tensors["labels"], tensors["cu_lengths"])
        if len(microbatch.rows):
            patch = round((self.shape.patch_bytes // 3) ** 0.5)
            pixels = Qwen2VLInputs(0, 1, self.image_mean, self.image_std).pixels
            inputs = {
                "x": pixels(torch.from_numpy(tensors["patches"]))[None],
                "imgs_sizes": torch.from_numpy((tensors["grid"] * patch).astype(np.int32)),
                "packed_seq_params": PackedSeqParams(qkv_format="thd", **_packing(tensors["cu_patches"])),
            }
            found["modality_inputs"] = {self.modality: {self.encoder: inputs}}
        return found

    def padding(self) -> Batch:
        """A batch without targets."""
        none = np.zeros(0, np.int64)
        return self._tokens(none, none, none, np.zeros(1, np.int32))

    def _tokens(self, ids: Any, places: Any, labels: Any, cu_lengths: Any) -> Batch:
        length, slots = self.shape.sequences * self.shape.tokens, np.arange(len(ids))
        if len(ids) > length:
            raise ValueError(f"a microbatch has {len(ids)} tokens, and batches have room for {length}")

        def padded(values: Any, padding: int = 0) -> Tensor:
            rows = self.shape.rows(values, slots, padding).reshape(1, length)
            return torch.from_numpy(rows.astype(np.int64))

        targets = padded(labels, IGNORED_LABEL)
        learned = targets != IGNORED_LABEL
        found: Batch = {
            "tokens" if self.modality is None else "input_ids": padded(ids),
            "labels": targets.where(learned, 0),
            "loss_mask": learned.float(),
            "position_ids": padded(places),
            "attention_mask": None,
        }
        ends = np.append(cu_lengths, length) if len(ids) < length else cu_lengths  # padding is a sample of its own
        if self.dense_mask:
            sample = torch.from_numpy(np.repeat(np.arange(len(ends) - 1), np.diff(ends)))
            found["attention_mask"] = ~(sample[:, None] == sample).tril()[None, None]
        elif self.modality is None:
            packing = _packing(ends)
            found["cu_seqlens"] = packing["cu_seqlens_q"][None]
            found["cu_seqlens_argmin"] = torch.tensor([len(ends)], dtype=torch.int32)
            found["max_seqlen"] = torch.tensor([packing["max_seqlen_q"]], dtype=torch.int32)
        else:
            found["packing_kwargs"] = _packing(ends)
        return found


class ServedIterator:
    """What Megatron calls `next` on; on the first and last pipeline stages only, others have None in its place."""

    def __init__(
        self,
        stream: WholeRankStream,
        batches: MegatronBatches,
        *,
        num_microbatches: int,
        start_step: int = 0,
        load: str | Path | None = None,
        save: str | Path | None = None,
    ) -> None:
        """Begin behind `start_step` updates.

        Args:
            stream: of this data-parallel rank.
            batches: makes a batch of each microbatch.
            num_microbatches: after which Megatron updates.
            start_step: updates that the checkpoint has seen, of whatever number of ranks.
            load: folder of the checkpoints that Megatron goes on from, with the state of their stream.
            save: folder of those that it will write; the first rank puts the state there at once.

        Raises:
            StateError: the checkpoint has seen another stream, or the job has no such step.
            ValueError: nothing says of which stream these updates were.
        """
        self._stream, self._batches, self._most = stream, batches, num_microbatches
        state = _state_behind(start_step, load) if start_step else stream.state_dict()
        stream.load_state_dict({**state, "step": start_step})
        if save is not None and stream.rank == 0:
            write_state(Path(save), stream.state_dict())
        self._found = self._all()

    def __iter__(self) -> "ServedIterator":
        return self

    def __next__(self) -> Batch:
        """The next batch; StopIteration behind the job's end, ValueError where a step has more microbatches."""
        return next(self._found)

    def for_chunks(self, chunks: int) -> list[Iterator[Batch]]:
        """One iterator for each model chunk of a virtual pipeline, all with the same batches; in place of this one."""
        return list(tee(self, chunks))

    def _all(self) -> Iterator[Batch]:
        for step in self._stream:
            if step.num_microbatches > self._most:
                raise ValueError(
                    f"step {step.number} has {step.num_microbatches} microbatches, and Megatron updates behind "
                    f"{self._most}: raise global_batch_size to at least {step.num_microbatches} x micro_batch_size x "
                    "data-parallel ranks"
                )
            for microbatch in step.microbatches:
                yield self._batches(microbatch)
            for _ in range(self._most - step.num_microbatches):
                yield self._batches.padding()


def _state_behind(updates: int, load: str | Path | None) -> dict[str, Any]:
    if load is None:
        raise ValueError(
            f"Megatron has made {updates} updates, and nothing says of which stream: pass the folder of their "
            "checkpoints as `load`"
        )
    return read_state(Path(load), f"load checkpoints that it wrote, or begin without their {updates} updates")


def _packing(ends: Any) -> dict[str, Any]:
    """Arguments of PackedSeqParams for samples that end there."""
    cu_seqlens = torch.from_numpy(np.ascontiguousarray(ends, np.int32))
    longest = int(np.diff(ends).max(initial=0))
    each = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return {**dict.fromkeys(each, cu_seqlens), "max_seqlen_q": longest, "max_seqlen_kv": longest}
