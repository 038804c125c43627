"""Megatron-Bridge's MegatronMIMO over the stream: each rank reads its own sequences and images, and nobody slices.

    cfg.dataset = ServedMimoProvider(servers="data-0:50051", job="job.yaml", seq_length=8192, modality="images")
    pretrain_megatron_mimo(cfg, forward_step, cfg.dataset.iterators)

Bridge's own loaders hand every rank the whole microbatch, and its step takes a slice. Here modules have ranks of
their own, each with as many data-parallel ones as the job says; its images are on the rank of the encoder that has the
number of their sequence's, which is where Bridge's communicators expect them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from trainclient.adapters.megatron import Batch, ServedIterator
from trainclient.adapters.megatron_bridge import ServedProvider

from megatron.bridge.training import megatron_mimo_step  # isort: skip
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY  # isort: skip

if TYPE_CHECKING:
    from megatron.bridge.models.megatron_mimo.megatron_mimo_provider import MegatronMIMOInfra
    from megatron.bridge.training.config import ConfigContainer
    from megatron.bridge.training.state import GlobalState, TrainState


@dataclass(kw_only=True)
class ServedMimoProvider(ServedProvider):
    """Makes the iterator of each rank of each module. micro_batch_size is 1, and global_batch_size the microbatches
    after which Bridge updates."""

    seq_length: int
    """Tokens of a batch: `execution.microbatch` x `stream.seq_len`."""

    def iterators(
        self, cfg: "ConfigContainer", infra: "MegatronMIMOInfra", train_state: "TrainState | None" = None
    ) -> tuple[ServedIterator | None, None]:
        """Bridge's `build_data_iterators_fn`: behind the updates that were made, and nothing for validation.

        All stages of the language model read, as its step wants, and the first one of an encoder; others get None.

        Raises:
            ValueError, StateError, ClientError: see `ServedProvider.build_datasets`.
        """
        module, *_ = infra.participating_modules
        groups = infra.pg_collections[module]
        if module != MIMO_LANGUAGE_MODULE_KEY and groups.pp.rank():
            return None, None
        return self.opened(groups.dp, cfg, self.seq_length, train_state.step if train_state else 0), None


def forward_step(state: "GlobalState", data_iterator: Iterator[Batch] | None, model: torch.nn.Module) -> Any:
    """Bridge's step of MegatronMIMO over batches that are a rank's own; its timer `batch-generator` is the wait."""
    sliced = megatron_mimo_step.slice_batch_for_megatron_mimo
    megatron_mimo_step.slice_batch_for_megatron_mimo = _own
    try:
        return megatron_mimo_step.forward_step(state, data_iterator and _timed(state, data_iterator), model)
    finally:
        megatron_mimo_step.slice_batch_for_megatron_mimo = sliced


def _timed(state: "GlobalState", batches: Iterator[Batch]) -> Iterator[Batch]:
    timer = state.timers("batch-generator", log_level=2)
    timer.start()
    try:
        batch = next(batches)
    except StopIteration as end:  # which Bridge would take for a mistake in its own parallelism
        raise ValueError(str(end)) from None
    timer.stop()
    yield batch


def _own(batch: Batch, *_: int) -> Batch:
    """Use the batch itself instead of a slice, and move to its device what Bridge leaves on the CPU."""
    for encoders in (batch.get("modality_inputs") or {}).values():
        for inputs in encoders.values():
            packed = inputs["packed_seq_params"]
            values = {field.name: getattr(packed, field.name) for field in fields(packed)}
            moved = {name: v.to(inputs["x"].device) for name, v in values.items() if torch.is_tensor(v)}
            inputs["packed_seq_params"] = replace(packed, **moved)
    return batch
