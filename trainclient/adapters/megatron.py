"""Megatron-LM's and Megatron-Bridge's external data iterators (`dataloader_type="external"`) over the stream.

    batches = MegatronBatches(stream, args.seq_length, modality="images", encoder="vit", image_token=290)
    iterator = ServedIterator(
        stream, batches, num_microbatches=get_num_microbatches, start_step=args.iteration, load=folder, save=folder
    )

One batch is a microbatch of this rank as one packed sequence (thd) of constant length. Megatron updates behind as many
microbatches as its options say; a step of fewer ends with such that are nothing but padding. What a checkpoint needs is
the number of updates, which Megatron keeps (`train_state.step`, `args.iteration`), whatever the number of ranks. Of
which stream they were, a file beside its checkpoints says.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import tee
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import default_convert

from trainclient.adapters.full_model import IGNORED_LABEL, FullModelMicrobatch, FullModelStream
from trainclient.adapters.padded import PaddedShape
from trainclient.adapters.qwen2_vl import MEAN, STD, Qwen2VLInputs
from trainclient.adapters.state_file import read_state, write_state
from trainclient.adapters.versions import require
from trainclient.stream.microbatch import Array

require("megatron-core", "0.16", "0.20")
from megatron.core import parallel_state  # noqa: E402
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

    stream: FullModelStream
    seq_length: int
    """Megatron's, whose micro_batch_size is 1: L."""
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
        shape = PaddedShape.of(self.stream)
        if self.seq_length != shape.sequences * shape.tokens:
            raise ValueError(
                f"Megatron's seq_length is {self.seq_length}, and the job's microbatches have {shape.sequences} "
                f"sequences (execution.microbatch) of {shape.tokens} tokens (stream.seq_len), one behind the other: "
                f"set seq_length to {shape.sequences * shape.tokens} and micro_batch_size to 1, or change the job"
            )
        object.__setattr__(self, "shape", shape)

    def __call__(self, microbatch: FullModelMicrobatch) -> Batch:
        """The batch of a microbatch; without images it has no modality_inputs.

        Where other ranks have images and this one has none (`FullModelMicrobatch.lacks_images`), a grey one takes the
        last token, which no other sees and which has no target.
        """
        tensors = microbatch.tensors
        ids = microbatch.token_ids(self.image_token)
        found = self._tokens(ids, tensors["position_ids"], tensors["labels"], tensors["cu_lengths"])
        patches, grid = microbatch.pictures
        if not len(grid):
            return _on_torch(found)
        if microbatch.lacks_images:
            found["input_ids"][0, -1] = self.image_token
        patch = round((self.shape.patch_bytes // 3) ** 0.5)
        packing = _packing(np.append(0, grid.prod(1).cumsum()))
        inputs = _on_torch({"x": patches, "imgs_sizes": (grid * patch).astype(np.int32), "packing": packing})
        inputs["x"] = Qwen2VLInputs(0, 1, self.image_mean, self.image_std).pixels(inputs["x"])[None]
        inputs["packed_seq_params"] = PackedSeqParams(qkv_format="thd", **inputs.pop("packing"))
        return {**_on_torch(found), "modality_inputs": {self.modality: {self.encoder: inputs}}}

    def padding(self) -> Batch:
        """Return a batch without targets, which trains nothing."""
        none = np.zeros(0, np.int64)
        return _on_torch(self._tokens(none, none, none, np.zeros(1, np.int64)))

    def _tokens(self, ids: Array, positions: Array, labels: Array, cu_lengths: Array) -> Batch:
        """All but images, as arrays."""
        length = self.shape.sequences * self.shape.tokens
        self.shape.require_room("tokens", len(ids), length)

        def padded(values: Array, padding: int = 0) -> Array:
            found = np.full((1, length), padding, np.int64)
            found[0, : len(values)] = values
            return found

        targets = padded(labels, IGNORED_LABEL)
        learned = targets != IGNORED_LABEL
        found: Batch = {
            "tokens" if self.modality is None else "input_ids": padded(ids),
            "labels": np.where(learned, targets, 0),
            "loss_mask": learned.astype(np.float32),
            "position_ids": padded(positions),
            "attention_mask": None,
        }
        ends = np.append(cu_lengths, length) if len(ids) < length else cu_lengths  # padding is a sample of its own
        if self.dense_mask:
            sample = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            found["attention_mask"] = ~np.tril(sample[:, None] == sample)[None, None]
        elif self.modality is None:
            packing = _packing(ends)
            found["cu_seqlens"] = packing["cu_seqlens_q"][None]
            found["cu_seqlens_argmin"] = np.array([len(ends)], np.int32)
            found["max_seqlen"] = np.array([packing["max_seqlen_q"]], np.int32)
        else:
            found["packing_kwargs"] = _packing(ends)
        return found


class ServedIterator(Iterator[Batch]):
    """What Megatron calls `next` on; on the first and last pipeline stages only, others have None."""

    def __init__(
        self,
        stream: FullModelStream,
        batches: MegatronBatches,
        *,
        num_microbatches: Callable[[], int],
        start_step: int = 0,
        load: str | Path | None = None,
        save: str | Path | None = None,
    ) -> None:
        """Begin behind `start_step` updates; without any, with the first step of the job.

        Args:
            stream: of this data-parallel rank.
            batches: makes a batch of each microbatch.
            num_microbatches: after which Megatron updates; asked for with every step, since schedules of batch sizes
                change it.
            start_step: updates that the checkpoint has seen, of whatever number of ranks.
            load: folder of the checkpoints that Megatron goes on from, with the state of their stream.
            save: folder of those that it will write; the first rank puts the state there at once.

        Raises:
            StateError: the checkpoint has seen another stream, or the job has no such step.
            ValueError: nothing says which stream these updates came from, the job continues a stream and no update
                was made, the stream is another data-parallel rank's, or Megatron would take microbatches for
                alike.
        """
        check_loss(getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None))
        if parallel_state.model_parallel_is_initialized():
            stream.require_rank_and_size(
                parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
            )
        continues, first = stream.job.stream.continues, stream.job.stream.first_step
        if continues is not None and not start_step:  # updates would be counted from 0, and steps from another number
            raise ValueError(
                f"the job continues another stream from step {first} on, and Megatron has made no update: go on from "
                "the checkpoint of that run, or leave stream.continues out of a new run"
            )
        self._stream, self._batches, self._num_microbatches = stream, batches, num_microbatches
        state = _state_behind(start_step, load) if start_step else stream.state_dict()
        stream.load_state_dict({**state, "step": start_step} if start_step else state)
        if save is not None and stream.rank == 0:
            write_state(Path(save), stream.state_dict())
        self._found = self._all()

    def __next__(self) -> Batch:
        """The next batch; StopIteration behind the job's end, ValueError where a step has more microbatches, and behind
        an error."""
        try:
            return next(self._found)
        except StopIteration:
            self._stream.require_ended()
            raise StopIteration(
                f"the job has ended behind its {len(self._stream)} steps, and Megatron asks for another: set "
                f"train_iters to at most {len(self._stream)}, or raise execution.end"
            ) from None

    def __len__(self) -> int:
        """Asked for by Megatron's own samplers, which would share out to ranks what is one rank's; ValueError."""
        raise ValueError(
            "Megatron would put a sampler and a DataLoader around the stream, which is one rank's already and reads "
            "ahead by itself: set dataloader_type to external"
        )

    def __bool__(self) -> bool:
        return True

    def close(self) -> None:
        """End the stream, for who goes on with something else; otherwise it ends with the iterator."""
        self._stream.close()

    def for_chunks(self, chunks: int) -> list[Iterator[Batch]]:
        """Iterators for the model chunks of a virtual pipeline, all with the same batches; use them instead of this."""
        return list(tee(self, chunks))

    def _all(self) -> Iterator[Batch]:
        for step in self._stream:
            most = self._num_microbatches()
            if step.num_microbatches > most:
                raise ValueError(
                    f"step {step.number} has {step.num_microbatches} microbatches, and Megatron updates behind "
                    f"{most}: raise global_batch_size to at least {step.num_microbatches} x micro_batch_size x "
                    "data-parallel ranks"
                )
            for microbatch in step.microbatches:
                yield self._batches(microbatch)
            for _ in range(most - step.num_microbatches):
                yield self._batches.padding()


def check_loss(options: Any) -> None:
    """Refuse Megatron's options, or its model's configuration, if losses are means of each microbatch; ValueError."""
    if getattr(options, "calculate_per_token_loss", None) is False:
        raise ValueError(
            "calculate_per_token_loss is False, by which Megatron takes the mean of each microbatch, and they have "
            "unequal numbers of targets: set it (--calculate-per-token-loss)"
        )


def _state_behind(updates: int, load: str | Path | None) -> dict[str, Any]:
    if load is None:
        raise ValueError(
            f"Megatron has made {updates} updates, and nothing says from which stream: pass the folder of their "
            "checkpoints as `load`"
        )
    return read_state(Path(load), f"load checkpoints that it wrote, or begin without their {updates} updates")


def _packing(ends: Array) -> dict[str, Any]:
    """Arguments of PackedSeqParams for samples that end there."""
    longest = int(np.diff(ends).max(initial=0))
    each = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    return {**dict.fromkeys(each, ends.astype(np.int32)), "max_seqlen_q": longest, "max_seqlen_kv": longest}


def _on_torch(found: Batch) -> Batch:
    """The batch with tensors instead of arrays."""
    converted: Batch = default_convert(found)  # type: ignore[no-untyped-call]
    return converted
