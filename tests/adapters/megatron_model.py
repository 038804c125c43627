"""A tiny MimoModel of megatron-core on CPUs, through our iterators and sample by sample: megatron_model.py SERVER."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from adapters.tiny_mimo import IMAGE, TOKENS, config, mimo
from adapters.whole_jobs import mixed_job, one_pass
from megatron.core import parallel_state
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from trainclient.adapters.full_model import FullModelStream
from trainclient.adapters.megatron import MegatronBatches, ServedIterator
from trainclient.adapters.qwen2_vl import Qwen2VLInputs

JobOf = Callable[[int], dict[str, Any]]


def gradients(model: MimoModel) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def train_on(model: MimoModel, batch: dict[str, Any], targets: int) -> float:
    losses, mask = model(**batch)
    loss = (losses * mask).sum() / targets
    loss.backward()
    return float(loss)


def shortfall(ranks: int) -> dict[str, Any]:
    """Five of its eight sequences have images: in a microbatch one of two ranks has a grey one in their place."""
    job = mixed_job(ranks, {"steps": 1})
    for dataset, weight in zip(job["stream"]["datasets"], ("0.65", "0.35"), strict=True):
        dataset["weight"] = weight
    return job


def served(model: MimoModel, server: str, job_of: JobOf, ranks: int) -> float:
    """The loss of step 0, as Megatron's schedules read it on each rank."""
    loss, lacks = 0.0, 0
    for rank in range(ranks):
        parallel_state.get_data_parallel_rank = lambda rank=rank: rank  # one process stands for all
        parallel_state.get_data_parallel_world_size = lambda: ranks
        with FullModelStream(server, job_of(ranks), rank=rank, world_size=ranks) as stream:
            targets = next(iter(stream)).text_tokens
            batches = MegatronBatches(stream, TOKENS, "images", "vit", IMAGE, dense_mask=True)
            iterator = ServedIterator(stream, batches, num_microbatches=lambda: 10)
            read = [next(iterator) for _ in range(10)]
            loss += sum(train_on(model, batch, targets) for batch in read)
            lacks += sum(int(batch["input_ids"][0, -1]) == IMAGE for batch in read)
    assert lacks == (job_of is shortfall and ranks == 2)
    return loss


def one_by_one(model: MimoModel, server: str, job_of: JobOf) -> float:
    """The same of each sample alone, without packing, padding or adapter."""
    loss, pixels = 0.0, Qwen2VLInputs(IMAGE, 1).pixels
    with FullModelStream(server, job_of(1), rank=0, world_size=1) as stream:
        step = next(iter(stream))
        for microbatch in step.microbatches:
            tensors = microbatch.tensors
            ids = tensors["token_ids"].astype(np.int64)
            ids[tensors["embedding_slots"]] = IMAGE
            image, starts = 0, tensors["embedding_slots"][np.cumsum(microbatch.rows) - microbatch.rows]
            for first, end in zip(tensors["cu_lengths"], tensors["cu_lengths"][1:], strict=False):
                length, labels = end - first, torch.from_numpy(tensors["labels"][first:end].astype(np.int64))[None]
                batch = {
                    "input_ids": torch.from_numpy(ids[first:end])[None], "labels": labels.clamp(0),
                    "position_ids": torch.arange(length)[None], "loss_mask": (labels >= 0).float(),
                    "attention_mask": torch.ones(1, 1, length, length).triu(1).bool(),
                }  # fmt: skip
                count = int(((starts >= first) & (starts < end)).sum())
                if count:
                    cu = torch.from_numpy(tensors["cu_patches"][image : image + count + 1].copy())
                    sizes = torch.from_numpy(tensors["grid"][image : image + count] * 14)
                    x = pixels(torch.from_numpy(tensors["patches"][cu[0] : cu[-1]].copy()))[None]
                    inputs = {
                        "x": x,
                        "imgs_sizes": sizes,
                        "packed_seq_params": PackedSeqParams(cu_seqlens_q=cu - cu[0]),
                    }
                    batch["modality_inputs"] = {"images": {"vit": inputs}}
                    image += count
                loss += train_on(model, batch, step.text_tokens)
    return loss


def main(server: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model = mimo(config())
    for job_of in (one_pass, shortfall):
        expected, wanted = one_by_one(model, server, job_of), gradients(model)
        for ranks in (1, 2):
            assert abs(served(model, server, job_of, ranks) / expected - 1) < 1e-5
            for name, found in gradients(model).items():
                torch.testing.assert_close(found, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert all(float(g.abs().sum()) > 0 for g in wanted.values())
    sys.stderr.write(f"loss {expected}\n")


if __name__ == "__main__":
    main(sys.argv[1])
