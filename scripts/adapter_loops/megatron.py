"""Megatron's schedule without pipelines: `megatron.py LOADER SHARDS OUT SERVER`, in one process of `RANKS`.

LOADER is a decoder, for Megatron-Energon with the packing of Megatron-LM's multimodal example; or `served`.
"""

import os
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adapter_loops.job import SERVED, full_job, job
from adapter_loops.measuring import RANKS, ROWS, SEQ_LEN, STEPS, WORKERS, Load, Meter
from adapter_loops.samples import IMAGE, Sample, sample
from dataserver.allocator import cache_freed_memory
from trainclient.adapters.full_model import FullModelStream
from trainclient.adapters.megatron import MegatronBatches, ServedIterator
from trainclient.adapters.qwen2_vl import Qwen2VLInputs

BUFFER = 100
"""Samples among which Energon packs; each of its workers has so many."""


class OnCPU(TorchFunctionMode):
    """The schedule counts tokens on a device of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**(kwargs or {})}
        if given.get("device") == "cuda":
            given["device"] = "cpu"
        return func(*args, **given)


class Model(nn.Module):
    """Has one weight, and tells a meter what it is handed; the meter sleeps as long as a device would compute."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        sizes = {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1}  # of nothing
        self.config = TransformerConfig(calculate_per_token_loss=True, **sizes)
        self.model_type = ModelType.encoder_or_decoder
        self._meter = meter

    def set_input_tensor(self, _: Any) -> None:
        """Take nothing: there is no other stage."""

    def forward(self, input_ids: Tensor, loss_mask: Tensor, **batch: Any) -> tuple[Tensor, Tensor]:
        """Losses [1, T] and their mask; padding is the id 0."""
        pixels, images = torch.empty(1, 0), 0
        for inputs in batch.get("modality_inputs", {}).get("images", {}).values():
            pixels, images = inputs["x"], len(inputs["imgs_sizes"])
        patches = pixels.shape[1]
        self._meter.microbatch(Load(images, int((input_ids > 0).sum()), patches, input_ids.numel(), patches))
        return self.weight * torch.ones_like(loss_mask), loss_mask


def forward_step(batches: Iterator[dict[str, Any]], model: Model) -> Any:
    """Megatron calls this for every microbatch."""
    losses, mask = model(**next(batches))
    return losses, lambda losses: ((losses * mask).sum(), mask.sum().int(), {})


def energon(shards: Path, decoder: str) -> Iterator[dict[str, Any]]:
    """Batches of packed samples, without end."""
    from loaders.energon import copied
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        WorkerConfig,
        basic_sample_keys,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )

    @stateless  # type: ignore[untyped-decorator]
    def cook(found: dict[str, Any]) -> dict[str, Any]:
        return {**basic_sample_keys(found), **sample(decoder, found["jpg"], found["txt"])}

    class Packing(DefaultTaskEncoder):  # type: ignore[misc]
        decoder = None
        cookers = (Cooker(cook),)

        @stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, found: Sample) -> Sample:
            return found

        def select_samples_to_pack(self, samples: list[Sample]) -> list[list[Sample]]:
            left, rows = sorted(samples, key=tokens_of), []
            while left:
                row, room = [], SEQ_LEN
                while at := bisect_right(left, room, key=tokens_of):
                    row.append(left.pop(at - 1))
                    room -= tokens_of(row[-1])
                rows.append(row)
            return rows

        @stateless  # type: ignore[untyped-decorator]
        def pack_selected_samples(self, samples: list[Sample]) -> dict[str, Any]:
            return {**basic_sample_keys(samples[0]), "row": packed(samples)}

        @stateless  # type: ignore[untyped-decorator]
        def batch(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
            found: dict[str, Any] = rows[0]["row"]
            return found

    if dist.get_rank() == 0:
        copied(shards)
    dist.barrier()
    dataset = get_train_dataset(
        str(copied(shards)),
        batch_size=1,
        shuffle_buffer_size=BUFFER,
        max_samples_per_sequence=BUFFER,
        packing_buffer_size=BUFFER,
        worker_config=WorkerConfig(rank=dist.get_rank(), world_size=RANKS, num_workers=WORKERS),
        task_encoder=Packing(),
    )
    return iter(get_savable_loader(dataset))


def tokens_of(found: Sample) -> int:
    """How many tokens a sample has."""
    return len(found["tokens"])


def packed(samples: list[Sample]) -> dict[str, Any]:
    """A row of samples, padded, with their images: arguments of the model."""
    lengths = [len(one["tokens"]) for one in samples]
    ids = np.zeros(SEQ_LEN, np.int64)
    ids[: sum(lengths)] = np.concatenate([one["tokens"] for one in samples])
    places = np.concatenate([np.arange(n) for n in [*lengths, SEQ_LEN - sum(lengths)]])
    counts = [len(one["patches"]) for one in samples]
    pixels = Qwen2VLInputs(0, 1).pixels(torch.from_numpy(np.concatenate([one["patches"] for one in samples])))
    mask = (ids > 0) & (ids != IMAGE)
    return {
        "input_ids": torch.from_numpy(ids)[None],
        "labels": torch.from_numpy(np.roll(ids, -1))[None],
        "loss_mask": torch.from_numpy(mask).float()[None],
        "position_ids": torch.from_numpy(places)[None],
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "modality_inputs": {"images": {"vit": {"x": pixels[None], "imgs_sizes": torch.tensor(counts)}}},
    }


def served(stream: FullModelStream) -> Iterator[dict[str, Any]]:
    """Yield batches of the adapter."""
    batches = MegatronBatches(stream, SEQ_LEN, modality="images", encoder="vit", image_token=IMAGE)
    return ServedIterator(stream, batches, num_microbatches=lambda: ROWS)


class Timed:
    """Times how long another iterator takes."""

    def __init__(self, inner: Iterator[dict[str, Any]], waited: list[float]) -> None:
        self._inner, self._waited = inner, waited

    def __next__(self) -> dict[str, Any]:
        began = time.perf_counter()
        batch = next(self._inner)
        self._waited[0] += time.perf_counter() - began
        return batch


def train(model: Model, batches: Any) -> None:
    """Megatron's schedule, and the cheapest update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OnCPU():
        for _ in range(STEPS):
            forward_backward_no_pipelining(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=model,
                num_microbatches=lambda: ROWS,
                seq_length=SEQ_LEN,
                micro_batch_size=1,
            )
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Run one loader on this rank."""
    loader, shards, out, server = sys.argv[1:]
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    waited = [0.0]
    if loader == SERVED:
        cache_freed_memory()
        model = Model(Meter(Path(out), lambda: waited[0], job, full_job, served, forward_step))
        with FullModelStream(server, full_job(), rank=int(os.environ["RANK"]), world_size=RANKS) as stream:
            train(model, Timed(served(stream), waited))
    else:
        model = Model(Meter(Path(out), lambda: waited[0], sample, tokens_of, packed, energon, forward_step))
        train(model, Timed(energon(Path(shards), loader), waited))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
