"""Generation within documents: targets, tokens and lengths against a slow count, and through order and plans."""

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from builders.jobs import dataset, job_data, make_job
from builders.samples import SyntheticDatasets
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning.job.identity import Job, JobSpecError, parse_job
from dataserver.planning.job.limits import limits_of
from dataserver.planning.layouts.shared.limits import BackboneLimits, longest_samples
from dataserver.planning.plan.arranging import module_images
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.documents import Split
from dataserver.planning.stream.gathering import gather_step, size_rows
from dataserver.planning.stream.samples import AUDIO, IMAGE, ShardTable, StepSamples, Task
from dataserver.planning.stream.sequence_rules import SequenceRules
from dataserver.planning.stream.sizing import SampleTooLargeError, may_be_generated, most_tokens, size_samples
from dataserver.planning.stream.statistics import ShardStatistics, axis_lengths, join_statistics, row_statistics
from dataserver.planning.stream.targets import DocumentTargets
from dataserver.planning.stream.windows import units_of

QUERIES = 5
SIDE = 28
"""Pixels of a side of a merged patch, which takes one token."""


def job_of(ratio: str = "0.5", seq_len: int = 64, documents: bool = False, **stream: Any) -> Job:
    split: dict[str, Any] = {"documents": {}} if documents else {}
    fields: dict[str, Any] = {
        "datasets": [dataset("books", **split)],
        "seq_len": seq_len,
        "global_batch": 4,
        "generation": {"ratio": ratio, "query_tokens": QUERIES, "interleaved": True},
        **stream,
    }
    return make_job(stream=fields, encoder=2, generator=2, backbone=(2, 1), execution={"end": {"epochs": 2}})


Item = tuple[str, int]
"""Kind, one of "tia" (text, image, audio), and the tokens that it takes, without those around an image."""
item = st.one_of(st.tuples(st.just("t"), st.integers(0, 12)), st.tuples(st.sampled_from("iiia"), st.integers(1, 6)))
books = st.lists(st.lists(item, max_size=9), min_size=1, max_size=6)


def columns_of(given: list[list[Item]]) -> ShardColumns:
    every = [one for document in given for one in document]
    texts = [[n for kind, n in document if kind == "t"] for document in given]
    images = [[one for one in document if one[0] != "t"] for document in given]
    flat = [one for of in images for one in of]
    modality = np.array([AUDIO if kind == "a" else IMAGE for kind, _ in flat], np.uint8)
    # 1/25 s of a clip is an embedding, and an image is so many merged patches wide
    widths = np.array([n * 640 if kind == "a" else n * SIDE for kind, n in flat], np.int32)
    heights = np.array([16000 if kind == "a" else SIDE for kind, _ in flat], np.int32)
    return ShardColumns(
        text_offsets=np.cumsum([0, *map(len, texts)]),
        text_tokens=np.array([n for of in texts for n in of], np.int32),
        image_offsets=np.cumsum([0, *map(len, images)]),
        image_width=widths,
        image_height=heights,
        image_modality=modality if (modality == AUDIO).any() else None,
        kinds=np.array([kind != "t" for kind, _ in every], np.uint8),
    )


def slow(document: list[Item], taken: list[int], seq_len: int) -> dict[int, tuple[int, int]]:
    """Text and all tokens of a document up to each image that may be its target."""
    kinds = [kind for kind, _ in document if kind != "t"]
    texts = sum(n for kind, n in document if kind == "t")
    if kinds == ["i"] and texts:
        return {}
    found, text, used, number = {}, 0, 0, 0
    for kind, n in document:
        if kind == "t":
            text, used = text + n, used + n
            continue
        tokens = 1 + used + 1 + QUERIES
        if kind == "i" and text and tokens <= seq_len:
            found[number] = text, tokens
        used, number = used + taken[number] + 2, number + 1
    return found


def sized(job: Job, given: list[list[Item]]) -> ShardTable:
    return size_rows(job.stream, columns_of(given), np.arange(len(given)), "here")


@settings(max_examples=150, deadline=None)
@given(books, st.sampled_from(["0.25", "0.5", "1"]), st.integers(60, 90), st.integers(0, 5))
def test_samples_are_those_of_the_slow_count(given: list[list[Item]], ratio: str, seq_len: int, epoch: int) -> None:
    job = job_of(ratio, seq_len)
    try:
        table = sized(job, given)
    except SampleTooLargeError:
        return
    patches = table.image_rows.astype(np.int64) * table.image_columns
    kinds = [kind for document in given for kind, _ in document if kind != "t"]
    taken = [int(n) // (2 if kind == "a" else 4) for kind, n in zip(kinds, patches, strict=True)]
    samples = size_samples(job.stream, 0, epoch, np.arange(len(given), dtype=np.uint64), table)
    longest = most_tokens(job.stream, table)
    for n, document in enumerate(given):
        first, end = table.image_offsets[n : n + 2].tolist()
        targets = slow(document, taken[first:end], seq_len)
        texts = sum(tokens for kind, tokens in document if kind == "t")
        is_pair = kinds[first:end] == ["i"] and texts > 0
        whole = min(seq_len, 2 + texts + sum(n + 2 for n in taken[first:end]))
        assert may_be_generated(job.stream, table)[n] == (is_pair or bool(targets))
        assert samples.text_tokens[n] + samples.truncated_tokens[n] == texts
        here = slice(*samples.image_offsets[n : n + 2].tolist())
        if not is_pair:
            mean = sum(tokens for _, tokens in targets.values()) // max(1, len(targets))
            share = Fraction(ratio) if targets else Fraction(0)
            assert table.nominal[n] == (whole * (1 - share) + mean * share) // 1
            assert longest[n] == max([whole, *(tokens for _, tokens in targets.values())])
        if samples.task[n] == Task.GENERATION and not is_pair:
            number = here.stop - here.start - 1
            assert (samples.text_tokens[n], samples.tokens[n]) == targets[number]
        else:
            assert here.stop - here.start == end - first
            assert is_pair or samples.tokens[n] == whole
        assert samples.image_rows[here].tolist() == table.image_rows[first : first + here.stop - here.start].tolist()
    if ratio == "1":
        assert (samples.task == Task.GENERATION).tolist() == may_be_generated(job.stream, table).tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(books, min_size=1, max_size=3), st.sampled_from(["0.3", "1"]), st.integers(60, 90), st.booleans())
def test_statistics_say_what_all_samples_say(
    given: list[list[list[Item]]], ratio: str, seq_len: int, documents: bool
) -> None:
    job = job_of(ratio, seq_len, documents)
    split, rule = Split.of(job.stream, job.stream.datasets[0]), DocumentTargets.of(job.stream)
    parts, tables = list[ShardStatistics](), list[ShardTable | None]()
    for shard in given:
        columns, row = columns_of(shard), np.arange(len(shard))
        parts.append(row_statistics(job.stream.sizing, columns, row, 0, split, rule))
        try:
            tables.append(size_rows(job.stream, columns, row, "here", split=split))
        except SampleTooLargeError:
            tables.append(None)
    statistics = join_statistics(parts)
    lengths, certain = axis_lengths(job.stream, statistics)
    longest = longest_samples(job.stream, statistics)
    for i, table in enumerate(tables):
        assert table is not None or not certain[i]
        if table is not None:
            assert certain[i]
            assert lengths[i] == units_of(job.stream, table).sum()
            assert longest[i] >= most_tokens(job.stream, table).max(initial=0)


def test_memory_of_a_generator_is_for_images_that_it_may_get() -> None:
    """A large image without text before it is read alone; behind text it may be a target, as that of a pair always."""
    data = json.loads(job_of(seq_len=120).text)
    data["execution"]["modules"][-1]["memory"] = {"budget_bytes": 400, "unit_bytes": 10}
    job = parse_job(data)
    large, text, small = ("i", 30), ("t", 2), ("i", 1)
    BackboneLimits(job.spec).add(0, sized(job, [[large, text, small], [small, text]]), "here")
    for document in ([text, large, small], [large, text]):
        with pytest.raises(SampleTooLargeError, match=r"it has 120 patches of an image.*module dit holds 40 \(1 too"):
            BackboneLimits(job.spec).add(0, sized(job, [[large, text, small], document]), "here")


def test_pairs_are_what_they_are_without_it() -> None:
    plain = {"ratio": "0.5", "query_tokens": QUERIES}
    pairs: list[list[Item]] = [[("i", n % 5 + 1), ("t", n)] for n in range(1, 40)]
    jobs = job_of(), job_of(generation=plain)
    tables = [sized(job, pairs) for job in jobs]
    assert np.array_equal(tables[0].nominal, tables[1].nominal)
    numbers = np.arange(39, dtype=np.uint64)
    ours, theirs = (size_samples(j.stream, 0, 3, numbers, table) for j, table in zip(jobs, tables, strict=True))
    for name in ("task", "text_tokens", "tokens", "image_offsets"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name))
    assert set(ours.task.tolist()) == {Task.UNDERSTANDING, Task.GENERATION}


def test_every_target_is_drawn_as_often_as_others_and_each_part_has_its_own() -> None:
    job = job_of("0.25", 120)
    document: list[Item] = [("i", 1), ("t", 3), ("i", 2), ("t", 2), ("i", 3), ("i", 1), ("t", 9)]
    table = sized(job, [document])
    counts = Counter[int]()
    for epoch in range(600):
        samples = size_samples(job.stream, 0, epoch, np.zeros(1, np.uint64), table)
        counts[len(samples.image_rows) - 1 if samples.task[0] == Task.GENERATION else -1] += 1
    assert counts.keys() == {-1, 1, 2, 3}  # nothing stands before the first
    assert abs(counts[-1] - 450) < 40
    assert all(abs(counts[n] - 50) < 25 for n in (1, 2, 3))

    job = job_of("1", 64, documents=True)
    split = Split.of(job.stream, job.stream.datasets[0])
    long: list[Item] = [("t", 2), ("i", 4), ("t", 1), ("i", 4), ("t", 40)] * 8
    table = size_rows(job.stream, columns_of([long]), np.array([0]), "here", split=split)
    has_targets, draws = may_be_generated(job.stream, table), set[tuple[int, ...]]()
    for epoch in range(30):
        samples = size_samples(job.stream, 0, epoch, np.zeros(len(table), np.uint64), table)
        assert ((samples.task == Task.GENERATION) == has_targets).all()
        draws.add(tuple(np.diff(samples.image_offsets)[has_targets].tolist()))
    assert has_targets.sum() > 4
    assert len(draws) > 15
    assert any(len(set(found)) > 1 for found in draws)


class Library:
    """Documents of a job, and its order over them."""

    def __init__(self, job: Job) -> None:
        rng = np.random.default_rng(3)
        shards = [[self._document(rng) for _ in range(9)] for _ in range(3)]
        self.split = Split.of(job.stream, job.stream.datasets[0])
        tables = [size_rows(job.stream, columns_of(shard), np.arange(9), "here", split=self.split) for shard in shards]
        self.job, self.data = job, SyntheticDatasets(job, [tables])

    def _document(self, rng: np.random.Generator) -> list[Item]:
        kinds = rng.choice(list("tti"), int(rng.integers(2, 12)))
        return [(str(kind), int(rng.integers(1, 14 if kind == "t" else 6))) for kind in kinds]

    def step(self, step: int) -> StepSamples:
        most = limits_of(self.job.spec.execution)
        return gather_step(self.job.stream, self.data.order, step, self.data.windows, most)


@pytest.mark.parametrize("documents", [False, True])
def test_plans_hold_every_image_once(documents: bool) -> None:
    packing = {"enabled": True, "max_images": 4} if documents else {"enabled": True}
    library = Library(job_of(seq_len=96, documents=documents, packing=packing))
    job, generated, before = library.job, 0, 0
    for step in range(library.data.order.num_steps):
        samples = library.step(step)
        plan = plan_step(job, step, samples)
        vit, llm, dit = (job.spec.execution.module(name) for name in ("vit", "llm", "dit"))
        read, made = (module_images(job.spec, m, samples) for m in (vit, dit))
        assert sorted([*read.tolist(), *made.tolist()]) == list(range(len(samples.image_rows)))
        is_target = samples.task == Task.GENERATION
        assert made.tolist() == (samples.image_offsets[1:][is_target] - 1).tolist()
        for m, images in ((vit, read), (dit, made)):
            assert sorted(plan.arrangement(m.name).item.tolist()) == images.tolist()
        assert plan.target_patches == samples.patches[made].sum()
        assert plan.text_tokens == samples.num_targets[~is_target].sum()
        to_llm, to_dit = plan.routings
        assert to_llm.rows.sum() == samples.patches[read].sum() // 4
        assert to_dit.rows.tolist() == [QUERIES] * len(made)
        at = plan.arrangement(llm.name)
        tokens = np.zeros((2, plan.num_microbatches), np.int64)
        np.add.at(tokens, (at.rank, at.microbatch), samples.tokens[at.item])
        assert tokens.sum() == samples.tokens.sum()
        rules = SequenceRules.of(job.stream, samples)
        assert (rules is not None) == documents
        assert rules is None or rules.items.sum() == len(read)
        generated += int(is_target.sum())
        before += int((np.diff(samples.image_offsets)[is_target] - 1).sum())
    assert generated > 8
    assert before > 4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no generation": ({"generation": {"interleaved": True}}, "interleaved is true, and ratio is 0"),
    "drawn captions": (
        {
            "datasets": [dataset(captions=[{"name": "own"}, {"name": "b"}])],
            "generation": {"ratio": "0.5", "interleaved": True},
        },
        "drawn anew in each epoch",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_jobs_that_read_no_document_up_to_an_image_are_refused(case: str) -> None:
    stream, words = REFUSED[case]
    with pytest.raises(JobSpecError, match=words):
        parse_job(job_data(stream=stream, generator=1))


def test_a_job_that_generates_pairs_alone_is_the_job_it_was() -> None:
    plain = make_job(stream={"generation": {"ratio": "0.5"}}, generator=1)
    assert make_job(stream={"generation": {"ratio": "0.5", "interleaved": False}}, generator=1) == plain
    ours = make_job(stream={"generation": {"ratio": "0.5", "interleaved": True}}, generator=1)
    assert ours.stream_id != plain.stream_id
    table = replace(sized(job_of(), [[("t", 1)]]), image_texts=None)
    with pytest.raises(ValueError, match="nothing says which text stands before"):
        size_samples(ours.stream, 0, 0, np.zeros(1, np.uint64), table)
