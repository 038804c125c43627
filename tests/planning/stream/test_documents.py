"""Documents in parts: against a slow count of every item, and through order, statistics and packing."""

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from builders.jobs import dataset, job_data, make_job
from builders.samples import SyntheticDatasets
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning import yielding_to
from dataserver.planning.job.fields import PackingPolicy
from dataserver.planning.job.identity import Job, JobSpecError, identify, parse_job
from dataserver.planning.job.limits import limits_of
from dataserver.planning.layouts.shared.sequences import pack_step
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.documents import Documents, Split, split_documents
from dataserver.planning.stream.gathering import gather_step, size_rows
from dataserver.planning.stream.order import StreamOrder
from dataserver.planning.stream.packing import balanced_within, best_fit_decreasing, best_fit_within
from dataserver.planning.stream.randomness import Operator, dataset_key, draw
from dataserver.planning.stream.samples import ROW_BITS, ShardTable, StepSamples
from dataserver.planning.stream.sequence_rules import SequenceRules
from dataserver.planning.stream.sizing import SampleTooLargeError, shard_table
from dataserver.planning.stream.slices import cut, gather_slice
from dataserver.planning.stream.statistics import ShardStatistics, axis_lengths, join_statistics, row_statistics
from dataserver.planning.stream.windows import Span, units_of

Item = tuple[str, int]
"""Kind, one of "tiav" (text, image, audio, video), and the tokens that it takes of a sequence."""


@dataclass
class Part:
    """What the slow count says of a part."""

    text_before: int
    text: int
    images_before: int
    images: list[str]


def slow(items: list[Item], seq_len: int, budget: tuple[int | None, ...], pairs: bool, rule: str) -> list[Part]:
    """The parts of a document, token by token."""
    kinds = Counter(kind for kind, _ in items)
    text_total = sum(n for kind, n in items if kind == "t")
    if not pairs and kinds["i"] == 1 and not kinds["a"] + kinds["v"] and text_total:
        return [Part(0, text_total, 0, ["i"])]
    room = seq_len - 2
    parts = [Part(0, 0, 0, [])]
    used = 0

    def next_part() -> None:
        nonlocal used
        last = parts[-1]
        parts.append(Part(last.text_before + last.text, 0, last.images_before + len(last.images), []))
        used = 0

    def is_full(kind: str) -> bool:
        most = budget["iav".index(kind)]
        return most is not None and parts[-1].images.count(kind) == most

    heard = False  # whether this is a clip whose video is in the part
    for (kind, tokens), (following, more) in pairwise([*items, ("", 0)]):
        if kind != "t":
            has_sound = rule == "videos" and (kind, following) == ("v", "a")
            needed, full = tokens + has_sound * more, is_full(kind) or (has_sound and is_full("a"))
            if used and not heard and (used + needed > room or full):
                next_part()
            heard = has_sound
            parts[-1].images.append(kind)
            used += tokens
            continue
        if tokens and used and tokens <= room < used + tokens:
            next_part()
        for _ in range(tokens):
            if used >= room:
                next_part()
            parts[-1].text += 1
            used += 1
    return parts


item = st.one_of(
    st.tuples(st.just("t"), st.integers(0, 30)),
    st.tuples(st.sampled_from("iiav"), st.integers(3, 14)),
)
heard = st.tuples(st.integers(3, 14), st.integers(3, 14)).map(lambda n: [("v", n[0]), ("a", n[1])])
document = st.lists(st.one_of(item.map(lambda one: [one]), heard), max_size=10).map(
    lambda found: [one for part in found for one in part]
)
documents = st.lists(document, max_size=6)


def flat(given: list[list[Item]]) -> Documents:
    every = [one for document in given for one in document]
    texts = [[n for kind, n in document if kind == "t"] for document in given]
    images = [[one for one in document if one[0] != "t"] for document in given]
    return Documents(
        kinds=np.array([kind != "t" for kind, _ in every], np.uint8),
        text_offsets=np.cumsum([0, *map(len, texts)]),
        text_tokens=np.array([n for of in texts for n in of], np.int32),
        image_offsets=np.cumsum([0, *map(len, images)]),
        image_tokens=np.array([n for of in images for _, n in of], np.int64),
        image_modality=np.array(["iav".index(kind) for of in images for kind, _ in of], np.uint8),
    )


@settings(max_examples=150, deadline=None)
@given(
    given=documents,
    seq_len=st.integers(8, 40),
    budget=st.tuples(*[st.none() | st.integers(1, 3)] * 3),
    pairs=st.booleans(),
    rule=st.sampled_from(["items", "videos"]),
)
def test_parts_are_those_of_the_slow_count(
    given: list[list[Item]], seq_len: int, budget: tuple[int | None, int | None, int | None], pairs: bool, rule: str
) -> None:
    found = split_documents(Split(rule, seq_len, budget, pairs), flat(given))
    images = [kind for document in given for kind, _ in document if kind != "t"]
    at = 0
    for number, document in enumerate(given):
        parts = slow(document, seq_len, budget, pairs, rule)
        for k, part in enumerate(parts):
            assert found.document[at] == number
            assert found.parts[at].tolist() == [k, len(parts), part.text_before, part.images_before]
            assert found.text_tokens[at] == part.text
            first, end = found.image_offsets[at : at + 2].tolist()
            assert images[first:end] == part.images
            at += 1
    assert at == len(found.document) == len(found.text_tokens) == len(found.image_offsets) - 1
    assert found.image_offsets[-1] == len(images)


def test_a_document_in_digits() -> None:
    """Of 20 tokens 18 are for items: a text that fits a whole part begins one, a longer one fills its part."""
    document: list[Item] = [("t", 10), ("i", 6), ("t", 9), ("t", 20), ("i", 6), ("i", 6), ("i", 6), ("t", 1)]
    found = split_documents(Split("items", 20, (2, None, None), True), flat([document, [("t", 3)]]))
    assert found.document.tolist() == [0, 0, 0, 0, 1]
    assert found.text_tokens.tolist() == [10, 9 + 9, 11, 1, 3]
    assert np.diff(found.image_offsets).tolist() == [1, 0, 1, 2, 0]
    assert found.parts.tolist() == [[0, 4, 0, 0], [1, 4, 10, 1], [2, 4, 28, 1], [3, 4, 39, 2], [0, 1, 0, 0]]


def test_a_video_and_its_sound_in_digits() -> None:
    """Of 20 tokens 18 are for items. A clip of its own, behind another clip, may go elsewhere."""
    document: list[Item] = [("i", 8), ("v", 6), ("a", 6), ("a", 8), ("v", 9), ("a", 9), ("t", 3), ("a", 16)]
    plain, together = (
        split_documents(Split(rule, 20, (None, None, None), True), flat([document])) for rule in ("items", "videos")
    )
    assert np.diff(plain.image_offsets).tolist() == [2, 2, 2, 0, 1]
    assert np.diff(together.image_offsets).tolist() == [1, 2, 1, 2, 0, 1]
    assert together.text_tokens.tolist() == [0, 0, 0, 0, 3, 0]
    of_one = split_documents(Split("videos", 20, (None, 1, None), True), flat([[("a", 3), ("v", 3), ("a", 3)]]))
    assert np.diff(of_one.image_offsets).tolist() == [1, 2]
    large = split_documents(Split("videos", 20, (None, None, None), True), flat([[("t", 1), ("v", 12), ("a", 12)]]))
    assert np.diff(large.image_offsets).tolist() == [0, 2], "no part holds both: they are alone in one"
    ends = split_documents(Split("videos", 20, (None, None, None), True), flat([[("v", 12)], [("a", 12)]]))
    assert np.diff(ends.image_offsets).tolist() == [1, 1], "they are of two documents"


def test_splitting_may_wait_with_every_part_and_refuses_too_many() -> None:
    waits = list[int]()
    with yielding_to(lambda: waits.append(1)):
        split_documents(Split("items", 8, (None, None, None), True), flat([[("t", 6 * 50)], [("t", 1)]]))
    assert len(waits) == 50
    with pytest.raises(SampleTooLargeError, match=r"have 100,663,302 tokens, more than 16,777,216 parts of seq_len 8:"):
        split_documents(Split("items", 8, (None, None, None), True), flat([[("t", 6 * (2**24 + 1))]]))


def shard(rng: np.random.Generator, count: int) -> ShardColumns:
    """Documents of 1 to 12 items in any order, some much longer than a sequence."""
    kinds, texts, images, tokens = list[int](), [0], [0], list[int]()
    for _ in range(count):
        of = rng.integers(0, 2, rng.integers(1, 13)).tolist()
        kinds += of
        texts.append(texts[-1] + of.count(0))
        images.append(images[-1] + of.count(1))
        tokens += np.exp(rng.normal(3.5, 1.6, of.count(0))).astype(int).tolist()
    sides = rng.integers(30, 300, (2, images[-1])).astype(np.int32)
    return ShardColumns(
        np.array(texts), np.array(tokens, np.int32), np.array(images), *sides, kinds=np.array(kinds, np.uint8)
    )


def job_of(together: bool = False, **changes: Any) -> Job:
    documents = {"max_images": 3, "together": together, **changes.pop("documents", {})}
    stream = {
        "datasets": [dataset("books", documents=documents)],
        "seq_len": 128,
        "sizing": {"patch": 14, "merge": 2, "max_patches": 200},
        "global_batch": 6,
        "shuffle_window": 2,
        **changes,
    }
    return make_job(stream=stream, execution={"end": {"epochs": 2}, **changes.pop("execution", {})}, backbone=(2, 1))


class Books:
    """The shards of a job of documents: tables, order, steps."""

    def __init__(self, job: Job, seed: int = 0, counts: tuple[int, ...] = (9, 1, 14, 5, 8)) -> None:
        rng = np.random.default_rng(seed)
        self.job, self.split = job, Split.of(job.stream, job.stream.datasets[0])
        self.columns = [shard(rng, count) for count in counts]
        rows = [np.arange(count)[:: 1 + n % 2] for n, count in enumerate(counts)]
        self.rows = [row.astype(np.int64) for row in rows]
        self.tables = [
            size_rows(job.stream, columns, row, "here", split=self.split)
            for columns, row in zip(self.columns, self.rows, strict=True)
        ]
        self.data = SyntheticDatasets(job, [self.tables])

    def step(self, step: int) -> StepSamples:
        most = limits_of(self.job.spec.execution)
        return gather_step(self.job.stream, self.data.order, step, self.data.windows, most)

    def every(self) -> Counter[tuple[int, ...]]:
        """Sample, part, parts, text tokens and images of all."""
        found = Counter[tuple[int, ...]]()
        for number, table in enumerate(self.tables):
            assert table.parts is not None
            counts = np.diff(table.image_offsets)
            for row, parts, text, images in zip(
                table.row.tolist(), table.parts.tolist(), table.text_tokens.tolist(), counts.tolist(), strict=True
            ):
                found[(number << ROW_BITS) | row, *parts, text, images] += 1
        return found


def named(samples: StepSamples) -> list[tuple[int, tuple[int, ...]]]:
    """Epoch, and what `Books.every` has, of a step."""
    assert samples.parts is not None
    columns = (samples.epoch, samples.sample, samples.text_tokens, np.diff(samples.image_offsets))
    rows = zip(*(column.tolist() for column in columns), samples.parts.tolist(), strict=True)
    return [(epoch, (sample, *parts, text, images)) for epoch, sample, text, images, parts in rows]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("together", "packed"), [(False, True), (True, True), (False, False)])
def test_each_epoch_has_each_part_once(version: int, together: bool, packed: bool) -> None:
    books = Books(job_of(together, order_version=version, packing={"enabled": packed}))
    steps = [named(books.step(k)) for k in range(books.data.order.num_steps)]
    for epoch in (0, 1):
        found = Counter(of for step in steps for e, of in step if e == epoch)
        assert found == books.every()
        order = [of for step in steps for e, of in step if e == epoch]
        numbers: dict[int, list[int]] = {}
        for of in order:
            numbers.setdefault(of[0], []).append(of[1])
        ascending = [found == sorted(found) for found in numbers.values()]
        assert all(ascending) if together else not all(ascending)
        if together and version == 1:
            runs = [a[0] != b[0] for a, b in pairwise(order)]
            assert sum(runs) == len(numbers) - 1  # every document in one run
    totals = [int(of.sum()) for of in [units_of(books.job.stream, t) for t in books.tables]]
    assert any(len(t) > len(set(t.row.tolist())) for t in books.tables)
    known, certain = axis_lengths(books.job.stream, _statistics(books))
    assert certain.all()
    assert known.tolist() == totals


def _statistics(books: Books) -> ShardStatistics:
    sizing = books.job.stream.sizing
    every = zip(books.columns, books.rows, strict=True)
    return join_statistics([row_statistics(sizing, columns, row, split=books.split) for columns, row in every])


@pytest.mark.parametrize("together", [False, True])
def test_slices_of_a_window_have_its_parts_in_its_order(together: bool) -> None:
    books = Books(job_of(together, shuffle_window=5))
    order: StreamOrder = books.data.order
    (span, *_) = order.spans(0)
    (whole,) = books.data.windows(span)
    slices = cut(order, span, books.tables.__getitem__, 900)
    assert len(slices) > 3
    parts = [gather_slice(order, span, books.tables.__getitem__, slices, n) for n in range(len(slices))]
    assert np.concatenate([p.sample for p in parts]).tolist() == whole.sample.tolist()
    assert np.concatenate([p.first for p in parts]).tolist() == whole.first.tolist()
    rows = [p.sizes.parts for p in parts if p.sizes.parts is not None]
    assert whole.sizes.parts is not None
    assert np.concatenate(rows).tolist() == whole.sizes.parts.tolist()


def test_parts_move_by_themselves_and_whole_documents_as_before() -> None:
    """The draw of a whole document, and of the first part of a longer one, is that of a sample."""
    books, window = Books(job_of(shuffle_window=5)), job_of(shuffle_window=5)
    (span, *_) = books.data.order.spans(0)
    table = books.tables[2]
    assert table.parts is not None
    numbers = books.data.order.numbers(2, table)
    words = books.data.order.draws(span, numbers, table)
    plain = SyntheticDatasets(window, [books.tables]).order.draws(span, numbers, _plain(table))
    first = table.parts[:, 0] == 0
    assert (words[first] == plain[first]).all()
    assert len(set(words.tolist())) == len(words)
    assert words[~first].tolist() == [
        _later(books, span, int(n), int(p)) for n, p in zip(numbers[~first], table.parts[~first, 0], strict=True)
    ]


def _later(books: Books, span: Span, number: int, part: int) -> int:
    key = dataset_key("books")
    seed = books.job.stream.seed
    word = draw(seed, Operator.SAMPLE_ORDER, key, span.epoch, np.array([number], np.uint64))
    at = np.array([(int(word[0]) + part) % 2**64], np.uint64)
    return int(draw(seed, Operator.PART_ORDER, key, span.epoch, at)[0])


def _plain(table: ShardTable) -> ShardTable:
    return replace(table, parts=None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 60), capacity=st.integers(20, 60))
def test_packing_without_limits_is_best_fit(seed: int, count: int, capacity: int) -> None:
    rng = np.random.default_rng(seed)
    tokens, items = rng.integers(1, capacity + 1, count), rng.integers(0, 4, (count, 3))
    unlimited = np.array([2**62] * 3)
    assert (
        best_fit_within(tokens, items, capacity, unlimited).tolist() == best_fit_decreasing(tokens, capacity).tolist()
    )
    budget = rng.integers(3, 7, 3)
    for sequence in (
        best_fit_within(tokens, items, capacity, budget),
        balanced_within(
            tokens,
            tokens * tokens,
            items,
            capacity,
            budget,
            count + 1,
            packed=best_fit_within(tokens, items, capacity, budget),
        ),
    ):
        held = np.zeros((count + 1, 4), np.int64)
        np.add.at(held, sequence, np.concatenate([tokens[:, None], items], axis=1))
        assert (held <= [capacity, *budget]).all()
        firsts = [sequence.tolist().index(n) for n in range(len(set(sequence.tolist())))]
        assert firsts == sorted(firsts)


def test_costs_are_balanced_within_a_budget() -> None:
    tokens, items = np.array([9, 8, 3, 2, 2]), np.array([[1, 0, 0]] * 5)
    packed = np.array([7, 7, 7, 7, 7])  # comes back where there is no room
    found = balanced_within(tokens, tokens * tokens, items, 20, np.array([2, 9, 9]), 3, packed)
    assert found.tolist() == [0, 1, 2, 2, 1]
    assert balanced_within(tokens, tokens * tokens, items, 20, np.array([2, 9, 9]), 2, packed) is packed
    assert best_fit_within(tokens, items, 20, np.array([2, 9, 9])).tolist() == [0, 0, 1, 1, 2]
    with pytest.raises(ValueError, match=r"sample 0 has \[1, 0, 0\] images, clips and videos; a sequence holds \[0, "):
        best_fit_within(tokens, items, 20, np.array([0, 9, 9]))


@pytest.mark.parametrize("policy", ["best_fit", "balanced"])
@pytest.mark.parametrize("budget", [None, 2])
def test_sequences_keep_parts_together_and_budgets(policy: str, budget: int | None) -> None:
    packing = {"enabled": True} if budget is None else {"enabled": True, "max_images": budget}
    job = job_of(True, documents={"max_images": 1}, packing=packing)
    books = Books(_with_policy(job, policy))
    shared = 0
    for step in range(0, books.data.order.num_steps, 3):
        samples = books.step(step)
        sequence, _ = pack_step(books.job, samples)
        rules = SequenceRules.of(books.job.stream, samples)
        assert rules is not None
        assert rules.hold(sequence, 128)
        tokens = np.bincount(sequence, weights=samples.tokens)
        assert tokens.max() <= 128
        images = np.bincount(sequence, weights=np.diff(samples.image_offsets))
        assert budget is None or images.max() <= budget
        bundle = rules.bundles(128)
        shared += len(bundle) - len(set(bundle.tolist()))
        for a, b in pairwise(range(len(bundle))):  # as long as both fit
            follows = bool(rules.follows[b])
            both = (bundle == bundle[a]) & (np.arange(len(bundle)) <= a)
            both[b] = True
            together, held = samples.tokens[both].sum(), np.diff(samples.image_offsets)[both].sum()
            fits = together <= 128 and (budget is None or held <= budget)
            assert (bundle[a] == bundle[b]) == (follows and bool(fits))
        assert rules.hold(np.arange(len(samples)), 128) == (len(set(bundle.tolist())) == len(bundle))
        plan = plan_step(books.job, step, samples)
        found = plan.arrangement("llm")
        place = np.empty(len(samples), np.int64)
        place[found.item] = (found.rank * plan.num_microbatches + found.microbatch) * 9 + found.slot
        assert rules.hold(np.unique(place, return_inverse=True)[1], 128)
    assert shared > 5


def _with_policy(job: Job, policy: str) -> Job:
    execution = job.spec.execution
    modules = tuple(
        m.model_copy(update={"packing": PackingPolicy(policy)}) if m.kind == "backbone" else m
        for m in execution.modules
    )
    assert any(str(m.packing) == policy for m in modules)
    return identify(job.spec.model_copy(update={"execution": execution.model_copy(update={"modules": modules})}))


def test_an_image_that_no_part_holds_is_named() -> None:
    job = job_of(seq_len=40)
    columns = ShardColumns(
        np.array([0, 1]), np.array([90], np.int32), np.array([0, 1]), np.array([280], np.int32),
        np.array([280], np.int32), kinds=np.array([0, 1], np.uint8),
    )  # fmt: skip
    split = Split.of(job.stream, job.stream.datasets[0])
    with pytest.raises(SampleTooLargeError, match=r"here, row 0: its images take .* but seq_len is 40"):
        size_rows(job.stream, columns, np.array([0]), "here", split=split)
    whole = shard_table(
        job.stream, np.array([0]), np.array([90]), np.array([0, 0]), np.zeros(0, np.int32), np.zeros(0, np.int32)
    )
    assert whole.nominal.tolist() == [40]


def test_pairs_that_may_be_generated_stay_whole() -> None:
    generation = {"ratio": "0.5", "query_tokens": 4}
    stream = {"datasets": [dataset("books", documents={})], "seq_len": 64, "generation": generation}
    job = make_job(stream=stream, generator=1)
    split = Split.of(job.stream, job.stream.datasets[0])
    assert split is not None
    columns = ShardColumns(
        np.array([0, 1, 2]), np.array([500, 500], np.int32), np.array([0, 1, 1]), np.array([28], np.int32),
        np.array([28], np.int32), kinds=np.array([1, 0, 0], np.uint8),
    )  # fmt: skip
    table = size_rows(job.stream, columns, np.array([0, 1]), "here", split=split)
    assert table.parts is not None
    assert table.parts[0].tolist() == [0, 1, 0, 0]
    assert table.parts[1:, 1].tolist() == [9] * 9
    assert table.text_tokens.tolist() == [500, *[62] * 8, 4]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "drawn captions": (
        {"datasets": [dataset(documents={}, captions=[{"name": "own"}, {"name": "b"}])]},
        "documents are split once and for all",
    ),
    "conversations": (
        {"datasets": [dataset(documents={}, conversations={"template": "1" * 64})]},
        "documents are split once and for all",
    ),
    "together alone": (
        {"datasets": [dataset(documents={"together": True})], "packing": {"enabled": False}},
        "packing is not enabled; leave together out",
    ),
    "a budget of sequences alone": ({"packing": {"enabled": False, "max_clips": 2}}, "packing is not enabled, and"),
    "a budget of whole samples": ({"packing": {"max_images": 2}}, "state documents for it, an empty mapping at least"),
    "towers": (
        {"datasets": [dataset(documents={})], "packing": {"enabled": False}, "contrastive_batch": 1, "global_batch": 1},
        "towers see an image and its text; leave documents",
    ),
    "no number": ({"datasets": [dataset(documents={"max_images": 0})]}, "max_images"),
    "another rule": ({"datasets": [dataset(documents={"split": "pages"})]}, "split"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_jobs_that_cannot_be_split_are_refused(case: str) -> None:
    stream, words = REFUSED[case]
    with pytest.raises(JobSpecError, match=words):
        parse_job(job_data(stream=stream))


def test_a_job_without_documents_is_the_job_it_was() -> None:
    plain = make_job(stream={"datasets": [dataset()], "packing": {"enabled": True}})
    assert plain.stream_id == make_job(stream={"datasets": [dataset()]}).stream_id
    split = make_job(stream={"datasets": [dataset(documents={})]})
    assert split.stream_id != plain.stream_id
    assert make_job(stream={"datasets": [dataset(documents={"split": "items", "together": False})]}) == split


GOLDEN = {
    (1, False): "9a95d6e4ba29832fa216ad766aff2ec3",
    (1, True): "8117683af0e10e951b0ceb035042d4dd",
    (2, False): "09a3ffc815d0c9d4d87a0dec20cbd808",
    (2, True): "9d0a87d215d2feb581b05b3ae61e2c72",
}


@pytest.mark.parametrize(("version", "together"), [(1, False), (1, True), (2, False), (2, True)])
def test_steps_are_those_of_every_release(version: int, together: bool) -> None:
    books = Books(job_of(together, order_version=version))
    found = hashlib.sha256(repr([named(books.step(k)) for k in (0, 3, 7)]).encode()).hexdigest()
    assert found[:32] == GOLDEN[version, together]
