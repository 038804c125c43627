"""The stream as torchtitan's data loader: `config.dataloader = ServedDataLoader.Config(...)`.

One batch is a microbatch of this rank, padded to (local_batch_size, seq_len). torchtitan updates behind a constant
number of them (its gradient accumulation); a step of fewer ends with batches that are nothing but padding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_convert

from dataserver.security import Credentials
from dataserver.tracing import Tracing
from trainclient.adapters.full_model import IGNORED_LABEL, FullModelMicrobatch, FullModelStream
from trainclient.adapters.padded import PaddedShape
from trainclient.adapters.qwen2_vl import MEAN, STD, Qwen2VLInputs, frames_and, positions
from trainclient.adapters.versions import require
from trainclient.stream.microbatch import Array

require("torchtitan", "0.3", "0.5")
try:
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError as error:
    if error.name != "torchtitan.components.dataloader":  # but a package that torchtitan wants
        raise
    # moved since 0.3
    from torchtitan.components.data.loader import BaseDataLoader

Batch = tuple[dict[str, Any], Tensor]


class ServedDataLoader(BaseDataLoader):
    """Iterates over the microbatches of one data-parallel rank. torchtitan saves and restores its state."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Where the stream comes from, and what the model takes."""

        servers: str
        """`host:port` entries with commas between."""
        job: str
        """A job's file, or its text."""
        batches_per_step: int
        """torchtitan's gradient accumulation: training.global_batch_size / (local_batch_size x data-parallel ranks)."""
        frames: int = 2
        """Frames in a patch (the encoder's temporal_patch_size)."""
        image_mean: tuple[float, ...] = MEAN
        image_std: tuple[float, ...] = STD
        credentials: Mapping[str, str] = field(default_factory=dict)
        """Files of `Credentials` by their names, such as tls_ca and token_file: what to show the servers."""
        tracing: Mapping[str, Any] = field(default_factory=dict)
        """Fields of `Tracing`, such as endpoint and every: which steps to trace, and where to; nothing by default."""
        mrope: bool = False
        """Whether the model takes `mrope_positions`, as Qwen's do."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, tokenizer: Any, **sizes: Any) -> None:
        """Open the stream; called by `Config.build`.

        Args:
            config: see there.
            dp_world_size: data-parallel ranks, as many as the job's modules have.
            dp_rank: of this process.
            tokenizer: torchtitan's; names the tokens that stand for images.
            sizes: `seq_len` and `local_batch_size`, or in later releases `num_tokens_per_batch`, which makes batches
                flat; others do not matter.

        Raises:
            ValueError: the job is for other ranks or batches of another size.
            ClientError: no server could be reached, or they refuse the job.
        """
        self._config = config
        shown = Credentials.of(**config.credentials)
        traced = Tracing(**config.tracing) if config.tracing else None
        self._stream = FullModelStream(
            config.servers, config.job, rank=dp_rank, world_size=dp_world_size, credentials=shown, tracing=traced
        )
        try:
            self._shape = PaddedShape.of(self._stream)
            _require_size(self._shape, sizes)
            _require_updates(config.batches_per_step, sizes)
            self._special = {
                f"{name}_id": getattr(tokenizer, f"{name}_id") for name in getattr(tokenizer, "TOKEN_FIELDS", ())
            }
            if self._stream.encoder is not None and "image_id" not in self._special:
                raise ValueError(
                    f"the job has the encoder {self._stream.encoder.name}, and the tokenizer "
                    f"{type(tokenizer).__name__} no image_id: configure torchtitan's MultiModalTokenizer, or "
                    "leave the encoder out"
                )
        except BaseException:
            self._stream.close()
            raise
        self._flat = "num_tokens_per_batch" in sizes
        self._num_handed_out = 0
        """Batches since the stream was set to a step."""
        self._pixels = Qwen2VLInputs(0, config.frames, config.image_mean, config.image_std).pixels

    def __iter__(self) -> Iterator[Batch]:
        """The microbatches that are left.

        Raises:
            ValueError: a step has more of them than `batches_per_step`, and see `FullModelStream`.
        """
        most = self._config.batches_per_step
        self._stream.go_to(self._stream.step)  # a step that an exception has cut short begins anew
        self._num_handed_out = 0
        for step in self._stream:
            if step.num_microbatches > most:
                raise ValueError(
                    f"step {step.number} has {step.num_microbatches} microbatches, and torchtitan updates behind "
                    f"{most}: raise batches_per_step and with it training.global_batch_size"
                )
            for microbatch in step.microbatches:
                self._num_handed_out += 1
                yield self._batch(microbatch)
            for _ in range(most - step.num_microbatches):
                self._num_handed_out += 1
                yield self._padding()

    def state_dict(self) -> dict[str, Any]:
        """The stream's, the same on all ranks.

        Raises:
            ValueError: it is saved in the middle of a step: torchtitan updates behind another number of batches.
        """
        most = self._config.batches_per_step
        if self._num_handed_out % most:
            raise ValueError(
                f"torchtitan saves behind {self._num_handed_out} batches, and a step has {most} (batches_per_step): "
                "set it to training.global_batch_size over local_batch_size and data-parallel ranks"
            )
        return self._stream.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of any number of ranks; StateError if it is of another stream."""
        self._stream.load_state_dict(state_dict)
        self._num_handed_out = 0

    def close(self) -> None:
        """End the stream that the batches come from."""
        self._stream.close()

    def _batch(self, microbatch: FullModelMicrobatch) -> Batch:
        tensors, slots = microbatch.tensors, self._shape.slots(microbatch)
        ids = microbatch.token_ids(self._special.get("image_id", 0))
        found, labels = self._tokens(ids, tensors["position_ids"], tensors["labels"], slots)
        if microbatch.lacks_images:  # at the end of padding or of a sample: no other token sees it, and it has no label
            found["input"].reshape(-1)[-1] = self._special["image_id"]
        patches, grid = microbatch.pictures
        if len(grid):
            found["grid_thw"] = frames_and(grid)
            if self._config.mrope:
                found["mrope_positions"] = self._shaped(positions(microbatch)[1:].T, slots)
        inputs = default_convert(found)  # type: ignore[no-untyped-call]
        if len(grid):
            each = self._pixels(torch.from_numpy(patches)).split(grid.prod(1).tolist())  # type: ignore[no-untyped-call]
            inputs["pixel_values"] = torch.nn.utils.rnn.pad_sequence(each, batch_first=True)
        return inputs, torch.from_numpy(labels)

    def _padding(self) -> Batch:
        none = np.zeros(0, np.int64)
        inputs, labels = self._tokens(none, none, none, none)
        return default_convert(inputs), torch.from_numpy(labels)  # type: ignore[no-untyped-call]

    def _tokens(self, ids: Array, position_ids: Array, labels: Array, slots: Array) -> tuple[dict[str, Any], Array]:
        found: dict[str, Any] = {"input": self._shaped(ids, slots), "positions": self._shaped(position_ids, slots)}
        if self._special:
            found |= {"pixel_values": None, "grid_thw": None, "pixel_values_videos": None, "grid_thw_videos": None}
            found["special_tokens"] = self._special
        return found, self._shaped(labels, slots, IGNORED_LABEL)

    def _shaped(self, values: Array, slots: Array, padding: int = 0) -> Array:
        rows = self._shape.rows(values, slots, padding).astype(np.int64)
        return rows.reshape(-1, *rows.shape[2:]) if self._flat else rows


def _require_updates(batches_per_step: int, sizes: Mapping[str, Any]) -> None:
    """torchtitan says behind how many batches it saves: a multiple of those behind which it updates."""
    saves = sizes.get("snapshot_every_n_steps")
    if saves and saves % batches_per_step:
        raise ValueError(
            f"torchtitan saves behind every {saves} batches, and batches_per_step is {batches_per_step}: set it to "
            "training.global_batch_size over local_batch_size and data-parallel ranks"
        )


def _require_size(shape: PaddedShape, sizes: Mapping[str, Any]) -> None:
    found = {
        "local_batch_size": shape.sequences,
        "seq_len": shape.tokens,
        "num_tokens_per_batch": shape.sequences * shape.tokens,
    }
    for name in found.keys() & sizes.keys():
        if sizes[name] != found[name]:
            raise ValueError(
                f"torchtitan's {name} is {sizes[name]}, and the job's microbatches have {shape.sequences} sequences "
                f"(execution.microbatch) of {shape.tokens} tokens (stream.seq_len): set {name} to {found[name]}, or "
                "change the job"
            )
