"""Megatron's external data iterators over the stream: their batches, and a MimoModel of megatron-core."""

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adapters.examples import variables
from adapters.stubs import adapter_over, parallel_state
from adapters.whole_jobs import mixed_job, one_pass, text_job, whole_job
from cli.forked import forks, run_script

from trainclient.adapters.full_model import FullModelMicrobatch, FullModelStream
from trainclient.stream.errors import ClosedError, StateError


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_each_sample_alone(server: str, tmp_path: Path) -> None:
    """Of one step of a MimoModel, read by one rank and by two, in the megatron-core that is installed beside us."""
    words, errors = [str(Path(__file__).with_name("megatron_model.py")), server], tmp_path / "errors"
    process = forks().Process(target=run_script, args=(words, variables(), errors))
    process.start()
    try:
        process.join(200)
    finally:
        process.kill()
        process.join()
    said = errors.read_text()
    assert process.exitcode == 0, said[-3000:]
    assert said.splitlines()[-1].startswith("loss ")


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Over the names that it takes from megatron-core."""
    contents = {
        "megatron.core": {"parallel_state": parallel_state()},
        "megatron.core.packed_seq_params": {"PackedSeqParams": SimpleNamespace},
    }
    return adapter_over(monkeypatch, "megatron", {"megatron-core": "0.16.1"}, contents)


@dataclass
class Read:
    """All batches of two steps, and the microbatches that they were made of."""

    batches: list[dict[str, Any]]
    microbatches: list[list[Any]]


def read(adapter: ModuleType, server: str, **options: Any) -> Read:
    with FullModelStream(server, one_pass(1), rank=0, world_size=1) as stream:
        iterator = adapter.ServedIterator(
            stream, adapter.MegatronBatches(stream, 256, **options), num_microbatches=lambda: 10
        )
        batches = [next(iterator) for _ in range(20)]
    with FullModelStream(server, one_pass(1), rank=0, world_size=1) as stream:
        steps = iter(stream)
        return Read(batches, [list(next(steps).microbatches) for _ in range(2)])


def test_mimo_batches_are_packed_and_padded(server: str, adapter: ModuleType) -> None:
    found = read(adapter, server, modality="images", encoder="vit", image_token=290)
    padded = 0
    for number, batch in enumerate(found.batches):
        step, position = divmod(number, 10)
        packing = batch["packing_kwargs"]
        ends = packing["cu_seqlens_q"].tolist()
        assert batch["input_ids"].shape == batch["labels"].shape == batch["loss_mask"].shape == (1, 256)
        assert ends[-1] == 256, "padding is a sample of its own"
        assert packing["max_seqlen_q"] == max(b - a for a, b in pairwise(ends))
        assert packing["cu_seqlens_kv_padded"].tolist() == ends
        if position >= len(found.microbatches[step]):
            assert not batch["loss_mask"].any()
            assert "modality_inputs" not in batch
            padded += 1
            continue
        tensors = found.microbatches[step][position].tensors
        count = len(tensors["labels"])
        assert ends[: len(tensors["cu_lengths"])] == tensors["cu_lengths"].tolist()
        assert batch["loss_mask"][0, :count].bool().tolist() == (tensors["labels"] != -100).tolist()
        assert (batch["labels"] * batch["loss_mask"])[0, :count].tolist() == tensors["labels"].clip(0).tolist()
        assert batch["position_ids"][0, :count].tolist() == tensors["position_ids"].tolist()
        assert (batch["input_ids"] == 290).sum() == len(tensors["embedding_slots"])
        if len(tensors["grid"]):
            inputs = batch["modality_inputs"]["images"]["vit"]
            assert inputs["x"].shape == (1, len(tensors["patches"]), 588)
            assert inputs["imgs_sizes"].tolist() == (tensors["grid"] * 14).tolist()
            assert inputs["packed_seq_params"].cu_seqlens_q.tolist() == tensors["cu_patches"].tolist()
    assert padded


def test_a_mask_keeps_samples_apart_where_attention_knows_no_packing(server: str, adapter: ModuleType) -> None:
    found = read(adapter, server, modality="images", dense_mask=True)
    tensors = found.microbatches[0][0].tensors
    mask = found.batches[0]["attention_mask"]
    assert mask.shape == (1, 1, 256, 256)
    for first, end in zip(tensors["cu_lengths"], tensors["cu_lengths"][1:], strict=False):
        assert torch.equal(~mask[0, 0, first:end, first:end], torch.ones(end - first, end - first).tril().bool())
        assert mask[0, 0, first:end, :first].all()
    assert "packing_kwargs" not in found.batches[0]


def test_batches_of_an_llm(server: str, adapter: ModuleType) -> None:
    with FullModelStream(server, text_job(), rank=0, world_size=1) as stream:
        batch = next(adapter.ServedIterator(stream, adapter.MegatronBatches(stream, 256), num_microbatches=lambda: 20))
        with pytest.raises(ValueError, match="encoder is None, and modality is images"):
            adapter.MegatronBatches(stream, 256, modality="images")
    ends = batch["cu_seqlens"]
    assert batch["tokens"].shape == (1, 256)
    assert ends.dtype == torch.int32
    assert batch["cu_seqlens_argmin"].tolist() == [ends.shape[1]]
    assert batch["max_seqlen"].tolist() == [int(ends.diff().max())]


def test_iterators_begin_behind_the_updates_of_a_checkpoint(server: str, adapter: ModuleType, tmp_path: Path) -> None:
    with FullModelStream(server, one_pass(1), rank=0, world_size=1) as stream:
        batches = adapter.MegatronBatches(stream, 256, modality="images")
        every = adapter.ServedIterator(stream, batches, num_microbatches=lambda: 10, save=tmp_path)
        expected = [next(every)["input_ids"] for _ in range(11)][-1]
        again = adapter.ServedIterator(stream, batches, num_microbatches=lambda: 10, start_step=1, load=tmp_path)
        assert [torch.equal(next(chunk)["input_ids"], expected) for chunk in again.for_chunks(2)] == [True, True]
        with pytest.raises(ValueError, match=r"microbatches, and Megatron updates behind 1: raise global_batch_size"):
            next(adapter.ServedIterator(stream, batches, num_microbatches=lambda: 1))
        with pytest.raises(StateError, match="found 99 as the step"):
            adapter.ServedIterator(stream, batches, num_microbatches=lambda: 10, start_step=99, load=tmp_path)


def test_steps_end_where_megatron_updates_and_the_job_says_that_it_has_ended(server: str, adapter: ModuleType) -> None:
    """With a schedule of batch sizes, too, in which Megatron updates behind more microbatches from some step on."""
    counts = iter((10, 12))
    with FullModelStream(server, whole_job(1, {"steps": 2}), rank=0, world_size=1) as stream:
        batches = adapter.MegatronBatches(stream, 256, modality="images")
        iterator = adapter.ServedIterator(stream, batches, num_microbatches=lambda: next(counts))
        targets = [[bool(next(iterator)["loss_mask"].any()) for _ in range(count)] for count in (10, 12)]
        assert all(found[0] and not found[-1] for found in targets), "each begins with data and ends with padding"
        with pytest.raises(
            StopIteration, match=r"ended behind its 2 steps.*train_iters to at most 2, or raise execution"
        ):
            next(iterator)


def test_updates_over_another_stream_are_refused(server: str, adapter: ModuleType, tmp_path: Path) -> None:
    with FullModelStream(server, one_pass(1), rank=0, world_size=1) as stream:
        batches = adapter.MegatronBatches(stream, 256, modality="images")
        adapter.ServedIterator(stream, batches, num_microbatches=lambda: 10, save=tmp_path / "ours")
    other = one_pass(1)
    other["stream"]["seed"] = 7
    with FullModelStream(server, other, rank=0, world_size=1) as stream:
        batches = adapter.MegatronBatches(stream, 256, modality="images")
        for load, error, says in (
            (tmp_path / "ours", StateError, r"differs in seed"),
            (tmp_path / "none", ValueError, r"none says nothing of the stream.*begin without their 3 updates"),
            (None, ValueError, r"has made 3 updates.*as `load`"),
        ):
            with pytest.raises(error, match=says):
                adapter.ServedIterator(
                    stream, batches, num_microbatches=lambda: 10, start_step=3, load=load, save=tmp_path
                )
        assert not (tmp_path / "data_state.json").exists(), "what it would have gone on to"


def test_a_stream_that_goes_on_does_so_with_the_updates_of_the_one_before(
    server: str, adapter: ModuleType, tmp_path: Path
) -> None:
    with FullModelStream(server, text_job(), rank=0, world_size=1) as stream:
        adapter.ServedIterator(
            stream, adapter.MegatronBatches(stream, 256), num_microbatches=lambda: 20, save=tmp_path / "before"
        )
        earlier = {"step": 3, "stream": json.loads(stream.state_dict()["stream"])}
    job = text_job(seed=1)
    job["stream"]["continues"] = earlier
    with FullModelStream(server, job, rank=0, world_size=1) as stream:
        batches = adapter.MegatronBatches(stream, 256)
        with pytest.raises(ValueError, match=r"from step 3 on, and Megatron has made no update: go on from the checkp"):
            adapter.ServedIterator(stream, batches, num_microbatches=lambda: 20)
        for updates, load, save in ((3, "before", "after"), (5, "after", None)):
            where = {"load": tmp_path / load, "save": save and tmp_path / save}
            adapter.ServedIterator(stream, batches, num_microbatches=lambda: 20, start_step=updates, **where)
            assert stream.state_dict()["step"] == updates


def test_a_grey_image_takes_the_last_token_where_other_ranks_have_images(
    server: str, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that sharded encoders run on all ranks; it has no target, and no other token sees it."""
    monkeypatch.setattr(FullModelMicrobatch, "lacks_images", property(lambda m: not len(m.rows)))
    with FullModelStream(server, mixed_job(1, {"steps": 2}), rank=0, world_size=1) as stream:
        batches = adapter.MegatronBatches(stream, 256, modality="images", encoder="vit", image_token=290)
        found = [batches(m) for step in stream for m in step.microbatches]
    added = 0
    for batch in found:
        inputs, standing = batch["modality_inputs"]["images"]["vit"], batch["input_ids"] == 290
        assert standing.sum() == (inputs["imgs_sizes"] // 14).prod(1).sum() // 4 == inputs["x"].shape[1] // 4
        assert not batch["loss_mask"][standing].any()
        assert not standing[0, -1] or inputs["imgs_sizes"].tolist() == [[28, 28]]
        added += bool(standing[0, -1])
    assert 0 < added < len(found)


def test_what_megatron_was_told_that_the_job_contradicts(
    server: str, adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FullModelStream(server, one_pass(1), rank=0, world_size=1) as stream:
        with pytest.raises(ValueError, match=r"seq_length is 512.*1 sequences.*of 256 tokens.*set seq_length to 256"):
            adapter.MegatronBatches(stream, 512, modality="images")
        batches = adapter.MegatronBatches(stream, 256, modality="images")
        iterator = adapter.ServedIterator(stream, batches, num_microbatches=lambda: 10)
        assert iterator, "Megatron asks whether there is one"
        iterator._found.close()
        with pytest.raises(ValueError, match=r"an error has ended step 0 before"):
            next(iterator)
        with pytest.raises(ValueError, match=r"one rank's already.*set dataloader_type to external"):
            len(iterator)
        monkeypatch.setattr(adapter, "parallel_state", parallel_state((1, 2)))
        with pytest.raises(ValueError, match=r"as rank 1 of 2, and the stream is of rank 0 of 1: open it with rank=1"):
            adapter.ServedIterator(stream, batches, num_microbatches=lambda: 10)
        told = ModuleType("megatron.training.global_vars")
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", told)
        told._GLOBAL_ARGS = SimpleNamespace(calculate_per_token_loss=False)  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"calculate_per_token_loss is False.*set it \(--calculate-per-token-loss"):
            adapter.ServedIterator(stream, batches, num_microbatches=lambda: 10)


def test_a_stream_ends_with_its_iterator(server: str, adapter: ModuleType) -> None:
    stream = FullModelStream(server, one_pass(1), rank=0, world_size=1)
    iterator = adapter.ServedIterator(
        stream, adapter.MegatronBatches(stream, 256, modality="images"), num_microbatches=lambda: 10
    )
    next(iterator)
    iterator.close()
    with pytest.raises(ClosedError):
        next(iter(stream))
