"""Ranks that run all modules themselves: every sample once, with its own images."""

import multiprocessing
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from adapters.conftest import BROKEN
from adapters.whole_jobs import mixed_job, whole_job
from builders.jobs import compose_whole, module
from torch.utils.data import DataLoader, DistributedSampler

from dataserver.planning.job.identity import parse_job
from trainclient.adapters.full_model import IGNORED_LABEL, FullModelMicrobatch, FullModelStream, _checked_encoder
from trainclient.stream.client import ArrayClient
from trainclient.stream.errors import FleetError, StateError
from trainclient.stream.microbatch import Array, Microbatch


def read(
    server: str,
    ranks: int,
    end: dict[str, int],
    start: dict[str, object] | None = None,
    job_of: Callable[[int, dict[str, int]], dict[str, Any]] = whole_job,
) -> list[FullModelMicrobatch]:
    """All microbatches of all ranks."""
    with ExitStack() as stack:
        job = job_of(ranks, end)
        streams = [
            stack.enter_context(FullModelStream(server, job, rank=rank, world_size=ranks)) for rank in range(ranks)
        ]
        for stream in streams if start else ():
            stream.load_state_dict(start or {})
        with ThreadPoolExecutor(ranks) as pool:
            found = pool.map(lambda stream: [m for step in stream for m in step.microbatches], streams)
            return list(chain.from_iterable(found))


def samples(microbatches: list[FullModelMicrobatch]) -> Counter[tuple[int, int, int]]:
    every = [m.backbone.items for m in microbatches]
    names = (zip(i.dataset.tolist(), i.epoch.tolist(), i.sample.tolist(), strict=True) for i in every)
    return Counter(chain.from_iterable(names))


def test_a_pass_holds_every_sample_once_on_any_number_of_ranks(server: str) -> None:
    alone, together = (samples(read(server, ranks, {"epochs": 1})) for ranks in (1, 2))
    assert alone == together
    assert len([name for name in alone if name[1] == 0]) == 50, "the larger dataset ends, the other one goes on"
    assert set(alone.values()) == {1}


def test_images_are_those_of_the_sequences_and_undecodable_ones_cost_their_sample_its_labels(server: str) -> None:
    ignored = 0
    for m in read(server, 2, {"epochs": 1}):
        assert m.images is not None
        tensors, items, images = m.tensors, m.backbone.items, m.images.items
        assert m.rows.sum() == len(tensors["embedding_slots"])
        begin = tensors["embedding_slots"][np.cumsum(m.rows) - m.rows]
        of = np.searchsorted(tensors["cu_lengths"], begin, side="right") - 1
        assert items.sample[of].tolist() == images.sample.tolist()
        assert items.dataset[of].tolist() == images.dataset.tolist()
        for n, (first, end) in enumerate(zip(tensors["cu_lengths"], tensors["cu_lengths"][1:], strict=False)):
            bad = not images.valid[of == n].all()
            assert bad is ((items.dataset[n], items.sample[n]) == (0, BROKEN))
            assert bad is bool((tensors["labels"][first:end] == IGNORED_LABEL).all())
            ignored += bad
    assert ignored == 1


def test_all_ranks_of_a_wave_have_images_or_none_or_know_who_lacks_them(server: str) -> None:
    by_wave: dict[tuple[int, int], list[FullModelMicrobatch]] = {}
    for m in read(server, 4, {"epochs": 1}, job_of=mixed_job):
        by_wave.setdefault((m.backbone.step, m.backbone.microbatch), []).append(m)
    kinds = Counter[str]()
    for microbatches in by_wave.values():
        have = [len(m.rows) > 0 for m in microbatches]
        assert len(have) == 4
        mixed = any(have) and not all(have)
        assert [m.lacks_images for m in microbatches] == [mixed and not own for own in have]
        kinds["mixed" if mixed else "images" if any(have) else "texts"] += 1
    assert min(kinds["images"], kinds["texts"]) > 0, kinds
    assert kinds["mixed"] <= len({step for step, _ in by_wave}), "one of a step at most"


def test_a_state_goes_on_with_another_number_of_ranks_after_the_step(server: str) -> None:
    with FullModelStream(server, whole_job(2, {"steps": 4}), rank=1, world_size=2) as stream:
        steps = iter(stream)
        first = next(steps)
        assert len(list(first.microbatches)) == first.num_microbatches
        state = stream.state_dict()
        assert state["step"] == 1
    whole, rest = (samples(read(server, 1, {"steps": 4}, start)) for start in (None, state))
    assert rest
    assert whole > rest
    with (
        FullModelStream(server, whole_job(1, {"steps": 4}, seed=7), rank=0, world_size=1) as stream,
        pytest.raises(StateError, match="seed"),
    ):
        stream.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "world_size", "says"),
    [
        ({}, 3, "dp 2: set its dp to the number of processes"),
        ({"identity_routing": False}, 2, "other ranks than their sequences.*set execution.identity_routing to true"),
    ],
)
def test_jobs_of_other_ranks(server: str, change: dict[str, object], world_size: int, says: str) -> None:
    job = whole_job(2, {"steps": 1})
    job["execution"].update(change)
    with pytest.raises(ValueError, match=says):
        FullModelStream(server, job, rank=0, world_size=world_size)


def test_an_encoder_of_audio_is_refused_by_name() -> None:
    modules = [module("encoder", name="ears", modality="audio", dp=1), module("backbone", dp=1)]
    execution = parse_job(compose_whole(modules, seq_len=512, global_batch=4, identity_routing=True)).spec.execution
    with pytest.raises(ValueError, match="module ears encodes audio, and ranks that run all modules encode images"):
        _checked_encoder(execution, 0, 1)


def test_a_rank_that_does_not_exist(server: str) -> None:
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"no rank {rank} of 2: number the processes from 0 to 1"):
            FullModelStream(server, whole_job(2, {"steps": 1}), rank=rank, world_size=2)


@pytest.mark.parametrize("read", [0, 1])
def test_a_loop_that_leaves_microbatches_out(server: str, read: int) -> None:
    """As one does that reads ahead, or deals out once more to the ranks what is one rank's."""
    with FullModelStream(server, whole_job(1, {"steps": 3}), rank=0, world_size=1) as stream:
        steps = iter(stream)
        for _ in range(read):
            next(next(steps).microbatches)
        with pytest.raises(
            ValueError, match=rf"{read} of the 9 microbatches of step 0 were read.*without a DataLoader"
        ):
            list(steps)


@pytest.mark.parametrize("count", [1, 4])
def test_a_step_that_was_not_read_to_its_end_begins_anew(server: str, count: int) -> None:
    """As after an exception in the loop; also where one view is ahead of the other."""
    with FullModelStream(server, whole_job(1, {"steps": 3}), rank=0, world_size=1) as stream:
        steps = iter(stream)
        whole = samples(list(next(steps).microbatches))
        microbatches = next(steps).microbatches
        cut = [next(microbatches) for _ in range(count)]
        next(stream._backbone)
        again = {step.number: list(step.microbatches) for step in stream}
        assert list(again) == [1, 2]
        assert [m.backbone.microbatch for m in again[1]] == list(range(len(again[1])))
        assert samples(cut) < samples(again[1])
        assert not samples(again[1]) & whole


@pytest.mark.parametrize(("microbatch", "count"), [(1, 9), (8, 2)])
def test_a_view_that_is_lost_leaves_neither_ahead_of_the_other(
    server: str, monkeypatch: pytest.MonkeyPatch, microbatch: int, count: int
) -> None:
    """Else a step would be left out, or sequences would get images of others, where a step begins with the loss."""
    job = whole_job(1, {"steps": 3})
    job["execution"]["microbatch"] = microbatch
    with FullModelStream(server, job, rank=0, world_size=1) as stream:
        first = next(steps := iter(stream))
        assert first.num_microbatches == len(list(first.microbatches)) == count
        read, encoder = ArrayClient.__next__, stream._encoder

        def failing(client: ArrayClient) -> Microbatch[Array]:
            if client is encoder:
                raise FleetError("no server could go on", {})
            return read(client)

        monkeypatch.setattr(ArrayClient, "__next__", failing)
        with pytest.raises(FleetError):
            next(steps)
        monkeypatch.undo()
        assert stream.state_dict()["step"] == 1
        again = [m for step in stream for m in step.microbatches]
        assert (again[0].backbone.step, again[-1].backbone.step) == (1, 2)
        for m in again:
            assert m.images is not None
            assert m.images.cursor == m.backbone.cursor


def test_a_loop_that_was_left_in_the_last_microbatch_has_to_say_where_it_stands(server: str) -> None:
    with FullModelStream(server, whole_job(1, {"steps": 3}), rank=0, world_size=1) as stream:
        for step in stream:
            if any(m.backbone.last_of_step for m in step.microbatches):
                break
        with pytest.raises(ValueError, match=r"last microbatch of step 0.*stream\.go_to\(0\) if not, stream.go_to\(1"):
            next(iter(stream))
        for number in (0, 1):
            stream.go_to(number)
            assert next(iter(stream)).number == number


LOADERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda stream: DataLoader(stream, batch_size=None),
    "accelerate": lambda stream: Accelerator().prepare(DataLoader(stream, batch_size=None)),
    "two processes": lambda stream: prepare_data_loader(DataLoader(stream), num_processes=2, process_index=0),
    "Lightning": lambda stream: DataLoader(stream, sampler=DistributedSampler(stream, 2, 0)),
}


@pytest.mark.parametrize("loader_of", LOADERS.values(), ids=LOADERS)
def test_a_data_loader_around_the_stream(server: str, loader_of: Callable[[Any], Any]) -> None:
    """Which frameworks would shard once more."""
    with FullModelStream(server, whole_job(1, {"steps": 3}), rank=0, world_size=1) as stream:
        loader = loader_of(stream)
        with pytest.raises(ValueError, match=r"asked for by its number.*without a DataLoader.*without accelerate's"):
            next(iter(loader))


def test_accelerate_takes_the_stream_as_it_is_and_keeps_its_state(server: str, tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, FullModelStream]:
        accelerator, stream = Accelerator(), FullModelStream(server, whole_job(1, {"steps": 3}), rank=0, world_size=1)
        accelerator.register_for_checkpointing(stream)
        assert accelerator.prepare(stream) is stream
        return accelerator, stream

    accelerator, stream = prepared()
    with stream:
        assert list(next(iter(stream)).microbatches)
        accelerator.save_state(str(tmp_path))
    accelerator, stream = prepared()
    with stream:
        accelerator.load_state(str(tmp_path))
        assert [step.number for step in stream if list(step.microbatches)] == [1, 2]


def test_batches_are_not_skipped_once_more(server: str) -> None:
    """accelerate's `skip_first_batches` looks for a data set, as others do that expect none."""
    with FullModelStream(server, whole_job(1, {"steps": 1}), rank=0, world_size=1) as stream:
        assert not hasattr(stream, "dataset")
        with pytest.raises(ValueError, match=r"what was trained is in its own state.*leave skip_first_batches out"):
            skip_first_batches(stream, 2)


def test_an_open_stream_is_sent_nowhere(server: str) -> None:
    """As to a process that is spawned."""
    with FullModelStream(server, whole_job(1, {"steps": 1}), rank=0, world_size=1) as stream:
        for opened in (stream, stream._backbone):
            process = multiprocessing.get_context("spawn").Process(target=print, args=(opened,))
            with pytest.raises(ValueError, match=r"belongs to the process that opened it: open one there"):
                process.start()
        assert len(list(next(iter(stream)).microbatches)) == 9


def test_another_process_or_rank_than_the_streams(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FullModelStream(server, whole_job(2, {"steps": 1}), rank=1, world_size=2) as stream:
        stream.require_rank_and_size(1, 2)
        with pytest.raises(ValueError, match=r"rank 0 of 4, and the stream is of rank 1 of 2: open it with rank=0"):
            stream.require_rank_and_size(0, 4)
        monkeypatch.setattr("os.getpid", lambda: 1)
        with pytest.raises(ValueError, match=r"is read in 1: .*num_workers=0"):
            next(iter(stream))


def test_jobs_of_other_modules(server: str) -> None:
    job = whole_job(1, {"steps": 1}, generation={"ratio": "0.5"})
    job["execution"]["modules"].append({"name": "painter", "kind": "generator"})
    del job["execution"]["identity_routing"]
    with pytest.raises(ValueError, match=r"painter.*trainclient train"):
        FullModelStream(server, job, rank=0, world_size=1)


def test_files_are_not_needed(tmp_path: Path, server: str) -> None:
    text = FullModelStream(server, whole_job(1, {"steps": 1}), rank=0, world_size=1)
    with text, FullModelStream(server, text.job.text, rank=0, world_size=1) as again:
        assert again.job.job_id == text.job.job_id
