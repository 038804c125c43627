"""Jobs over real indexed shards."""

import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.jobs import job_data
from shards import write_interleaved, write_pairs, write_texts

from dataserver.assembly.tokens import load_tokenizer, tokenizer_spec
from dataserver.dataset import (
    Dataset,
    FilterError,
    Quarantine,
    TokensMissingError,
    build_index,
    count_tokens,
)
from dataserver.jobs import FairScheduler, JobCache, JobPlanner, tables
from dataserver.planning.job.identity import parse_job
from dataserver.planning.plan.plan import StepPlan
from dataserver.planning.stream.gathering import Window, gather_window
from dataserver.planning.stream.grids import patch_grid
from dataserver.planning.stream.order import DatasetEmptyError, StepOutOfRangeError, StreamOrder
from dataserver.planning.stream.samples import ROW_BITS, ShardTable, Task
from dataserver.planning.stream.sizing import SampleTooLargeError
from dataserver.planning.stream.slices import Slices, Table, gather_slice
from dataserver.planning.stream.windows import Span

BYTES = load_tokenizer("bytes", None)


def index(folder: Path) -> Path:
    build_index(folder, workers=1)
    count_tokens(folder, BYTES)
    return folder


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("pairs"), num_samples=40, shard_size=16))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_interleaved(tmp_path_factory.mktemp("documents"), num_samples=12, shard_size=5))


def planner(*datasets: Dataset, changes: dict[str, Any] | None = None, **layout: Any) -> JobPlanner:
    """A planner of a job without packing that passes once over the datasets; `changes` by dataset or stream field."""
    entries = [{"name": f"d{i}", "fingerprint": d.fingerprint} for i, d in enumerate(datasets)]
    stream = {
        "datasets": entries,
        "tokenizer": tokenizer_spec(BYTES).model_dump(mode="json"),
        "seq_len": 4096,
        "global_batch": 8,
        "packing": {"enabled": False},
    }
    for name, value in (changes or {}).items():
        (entries[0] if name in ("filter", "quarantine", "weight") else stream)[name] = value
    execution = layout.pop("execution", {"end": {"epochs": 1}})
    data = job_data(stream=stream, execution=execution, backbone=(2, 1), **layout)
    return JobPlanner(parse_job(data), datasets)


def ids(plans: list[StepPlan]) -> list[tuple[int, int]]:
    samples = [int(s) for p in plans for s in p.samples.sample]
    return [(s >> ROW_BITS, s & ((1 << ROW_BITS) - 1)) for s in samples]


def every_plan(jobs: JobPlanner) -> list[StepPlan]:
    return [jobs.plan(step) for step in range(jobs.num_steps)]


def test_one_pass_serves_every_sample_with_its_sizes(pairs: Path) -> None:
    dataset = Dataset.open(pairs)
    jobs = planner(dataset)
    plans = every_plan(jobs)
    assert jobs.num_steps == 5
    assert sorted(ids(plans)) == [(shard.position, row) for shard in dataset.shards for row in range(shard.num_samples)]
    for plan in plans:
        for i, (shard, row) in enumerate(ids([plan])):
            parts, image = dataset.shards[shard].parts(row), dataset.shards[shard].image(row, 0)
            tokens = sum(len(text.encode()) for text in parts.texts)
            grid = patch_grid(image.width, image.height, jobs.job.stream.sizing)
            assert (plan.samples.image_rows[i], plan.samples.image_columns[i]) == grid
            assert plan.samples.text_tokens[i] == tokens
            assert plan.samples.tokens[i] == 4 + tokens + grid[0] * grid[1] // 4
            assert plan.samples.task[i] == Task.UNDERSTANDING


def test_documents_with_many_images(documents: Path) -> None:
    dataset = Dataset.open(documents)
    jobs = planner(dataset, changes={"packing": {"enabled": True}})
    plans = every_plan(jobs)
    assert sorted(ids(plans)) == [(shard.position, row) for shard in dataset.shards for row in range(shard.num_samples)]
    for plan in plans:
        for i, (shard, row) in enumerate(ids([plan])):
            images = slice(*plan.samples.image_offsets[i : i + 2].tolist())
            kinds = dataset.shards[shard].parts(row).kinds
            refs = [dataset.shards[shard].image(row, k) for k in range(sum(kinds))]
            grids = [patch_grid(r.width, r.height, jobs.job.stream.sizing) for r in refs]
            sides = plan.samples.image_rows[images], plan.samples.image_columns[images]
            assert list(zip(*(side.tolist() for side in sides), strict=True)) == grids


def test_mixtures_share_a_step(pairs: Path, documents: Path) -> None:
    jobs = planner(Dataset.open(pairs), Dataset.open(documents), changes={"weight": "3"})
    counts = [np.bincount(plan.samples.dataset, minlength=2).tolist() for plan in every_plan(jobs)]
    assert counts[0] == [6, 2]
    assert sum(c[0] for c in counts) >= 40
    assert sum(c[1] for c in counts) >= 12
    assert all(sum(c) == 8 for c in counts[:-1])


def test_a_step_is_planned_once_for_all_threads(pairs: Path) -> None:
    jobs = planner(Dataset.open(pairs))
    for step in range(3):
        barrier, found = threading.Barrier(8), list[StepPlan]()

        def ask(step: int = step, barrier: threading.Barrier = barrier, found: list[StepPlan] = found) -> None:
            barrier.wait(timeout=20)
            found.append(jobs.plan(step))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert len(found) == 8
        assert len({id(plan) for plan in found}) == 1
    assert planner(Dataset.open(pairs)).plan(1).hash == jobs.plan(1).hash


def test_a_plan_that_was_dropped_is_made_again(pairs: Path) -> None:
    dataset = Dataset.open(pairs)
    job = planner(dataset, execution={"end": {"steps": 100}}).job
    jobs = JobPlanner(job, [dataset], JobCache(200_000))
    first = jobs.plan(0)
    for step in range(1, 40):
        jobs.plan(step)
    assert jobs.plan(0) is first, "what is in use is not made again"
    dropped, expected = weakref.ref(first), first.hash
    del first
    for step in range(1, 40):
        jobs.plan(step)
    assert dropped() is None
    assert jobs.plan(0).hash == expected


def test_steps_beyond_the_end_fail_every_time(pairs: Path) -> None:
    jobs = planner(Dataset.open(pairs))
    for _ in range(2):
        with pytest.raises(StepOutOfRangeError, match="step 5 does not exist; the job ends after step 4"):
            jobs.plan(5)
    assert len(jobs.plan(4).samples) == 8


def test_nobody_is_asked_for_steps_beyond_the_end(pairs: Path) -> None:
    asked: list[int] = []
    dataset = Dataset.open(pairs)
    jobs = JobPlanner(planner(dataset).job, [dataset], fetch=lambda _planner, step, _unwanted: asked.append(step))
    for step in (5, 1 << 40):
        with pytest.raises(StepOutOfRangeError):
            jobs.plan(step)
    assert jobs.plan(4)
    assert asked == [4]


def test_a_filter_leaves_samples_out(pairs: Path) -> None:
    dataset = Dataset.open(pairs)
    jobs = planner(dataset, changes={"filter": "width >= 96 and punsafe < 0.5"})
    expected = [
        (shard.position, row)
        for shard in dataset.shards
        for row in range(shard.num_samples)
        if shard.column("width")[row].as_py() >= 96 and shard.column("punsafe")[row].as_py() < 0.5
    ]
    assert 0 < len(expected) < 40
    assert sorted(ids(every_plan(jobs))) == expected


@pytest.mark.parametrize("text", ["heigth > 3", "width >", "width > 'x'"])
def test_filters_that_do_not_fit_are_refused(pairs: Path, text: str) -> None:
    with pytest.raises(FilterError, match="dataset d0: the filter"):
        planner(Dataset.open(pairs), changes={"filter": text})


def test_a_filter_that_leaves_nothing_is_refused(pairs: Path) -> None:
    with pytest.raises(DatasetEmptyError, match=r"dataset d0: filter 'width > 9999' .* no sample of 3 shards"):
        planner(Dataset.open(pairs), changes={"filter": "width > 9999"})


def test_quarantine_only_where_the_job_names_it(pairs: Path, tmp_path: Path) -> None:
    plain = Dataset.open(pairs)
    shard = plain.shards[1]
    listed = Quarantine.from_samples([(shard.name, shard.keys()[2]), (shard.name, shard.keys()[5])])
    listed.save(tmp_path / "bad.jsonl")
    dataset = Dataset.open(pairs, quarantine=tmp_path / "bad.jsonl")
    everything = ids(every_plan(planner(plain)))
    assert ids(every_plan(planner(dataset))) == everything
    left = ids(every_plan(planner(dataset, changes={"quarantine": listed.digest})))
    assert sorted(set(everything) - set(left)) == [(1, 2), (1, 5)]
    assert len(left) == 38


def test_uncounted_tokens_name_the_command(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "texts", num_samples=4)
    build_index(folder, workers=1)
    with pytest.raises(TokensMissingError, match=r"is not counted .* run: dataserver index"):
        planner(Dataset.open(folder))
    count_tokens(folder, BYTES)
    assert len(planner(Dataset.open(folder)).plan(0).samples) == 4


def test_a_sample_that_cannot_fit_is_named(documents: Path) -> None:
    dataset = Dataset.open(documents)
    with pytest.raises(SampleTooLargeError, match=r"dataset d0, shard 0000\d\.tar, row \d+: its images"):
        planner(dataset, changes={"seq_len": 8})


def test_images_without_an_encoder_are_refused(pairs: Path, tmp_path: Path) -> None:
    dataset = Dataset.open(pairs)
    with pytest.raises(ValueError, match=r"dataset d0, shard 00000.tar, row 0: .* no module of kind encoder"):
        planner(dataset, encoder=0)
    generation = {"generation": {"ratio": "1"}}
    jobs = planner(dataset, changes=generation, encoder=0, generator=2)
    assert {int(t) for plan in every_plan(jobs) for t in plan.samples.task} == {Task.GENERATION}
    texts = Dataset.open(index(write_texts(tmp_path / "texts", num_samples=9)))
    assert planner(texts, encoder=0).num_steps == 2


def test_copies_of_a_dataset_give_the_same_plans(pairs: Path, tmp_path: Path) -> None:
    copy = index(write_pairs(tmp_path / "elsewhere", num_samples=40, shard_size=16))
    ours, theirs = planner(Dataset.open(pairs)), planner(Dataset.open(copy))
    assert ours.job.job_id == theirs.job.job_id
    assert [p.hash for p in every_plan(ours)] == [p.hash for p in every_plan(theirs)]


def test_steps_that_no_server_could_hold_are_refused(pairs: Path) -> None:
    huge = {"global_batch": 2**15, "seq_len": 2**16, "packing": {"enabled": True}}
    with pytest.raises(
        ValueError, match=r"step_samples is about [\d,]+, .* plan_version 8 takes at most 131,072: lower"
    ):
        planner(Dataset.open(pairs), changes=huge)


def test_a_window_is_sorted_once_for_its_steps(
    pairs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[tuple[int, ...]] = []

    def counted(order: StreamOrder, span: Span, shards: list[ShardTable]) -> Window:
        gathered.append(span.shards)
        return gather_window(order, span, shards)

    monkeypatch.setattr(tables, "gather_window", counted)
    plans = every_plan(planner(Dataset.open(pairs), changes={"shuffle_window": 2}))
    assert len(plans) == 5
    assert sorted(map(len, gathered)) == [1, 2]
    assert {shard for window in gathered for shard in window} == {0, 1, 2}
    assert not caplog.records


def test_a_window_larger_than_what_is_kept_is_sorted_in_slices_and_named_once(
    pairs: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slice is gathered once for its steps, however many there are, and nothing larger is ever held."""
    gathered: list[int] = []

    def counted(order: StreamOrder, span: Span, table: Table, slices: Slices, number: int) -> Window:
        gathered.append(number)
        window = gather_slice(order, span, table, slices, number)
        assert len(window.sample) < 40
        return window

    monkeypatch.setattr(tables, "gather_slice", counted)
    dataset = Dataset.open(pairs)
    jobs = planner(dataset)
    tight = JobPlanner(jobs.job, [dataset], JobCache(9_000))
    assert ids(every_plan(tight)) == ids(every_plan(jobs))
    assert gathered == sorted(set(gathered))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "a window of 3 shards takes more than the 3000 bytes of the cache of windows" in warning
    assert f"sorted in {len(gathered)} slices" in warning
    assert "lower stream.shuffle_window (now 8)" in warning


def test_two_jobs_and_many_threads_compute_no_table_and_no_window_twice(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs of one stream that are planned at once by eight threads."""
    made: list[tuple[str, object]] = []
    size_rows, gather = tables.size_rows, gather_window

    def sized(stream: Any, columns: Any, row: Any, where: str, captions: Any, split: Any) -> ShardTable:
        made.append(("table", where))
        return size_rows(stream, columns, row, where, captions, split)

    def gathered(order: StreamOrder, span: Span, shards: list[ShardTable]) -> Window:
        made.append(("window", (span.epoch, span.shards)))
        return gather(order, span, shards)

    monkeypatch.setattr(tables, "size_rows", sized)
    monkeypatch.setattr(tables, "gather_window", gathered)
    dataset, cache, scheduler = Dataset.open(pairs), JobCache(), FairScheduler(at_once=4)
    ends = [{"end": {"epochs": 1}, "microbatch": size} for size in (1, 2)]
    jobs = [planner(dataset, changes={"shuffle_window": 2}, execution=end).job for end in ends]
    assert len({job.job_id for job in jobs}) == 2
    planners = [JobPlanner(job, [dataset], cache, scheduler) for job in jobs]
    made.clear()
    barrier, failed = threading.Barrier(8), list[BaseException]()

    def plan(one: JobPlanner, first: int) -> None:
        barrier.wait(timeout=20)
        try:
            for step in range(one.num_steps):
                one.plan((first + step) % one.num_steps)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=plan, args=(planners[i % 2], i // 2)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failed
    assert len(made) == len(set(made)) == 3 + 2


def test_what_is_kept_of_other_jobs_is_forgotten(pairs: Path) -> None:
    dataset, cache = Dataset.open(pairs), JobCache()
    one, other = (planner(dataset, changes={"shuffle_window": size}).job for size in (1, 2))
    caches = cache.tables, cache.windows, cache.cuts, cache.plans

    def used() -> list[int]:
        return [cache.used for cache in caches]

    every_plan(JobPlanner(one, [dataset], cache))
    before = used()
    every_plan(JobPlanner(other, [dataset], cache))
    assert all(more > 0 for more in np.subtract(used(), before))
    cache.forget_others([one])
    assert used() == before
    cache.forget_others([])
    assert used() == [0] * 4
