"""Streams that continue each other, over real indexed shards, against a slow count of every sample of every step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from builders.jobs import job_data
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_pairs, write_texts

from dataserver.assembly.tokens import load_tokenizer, tokenizer_spec
from dataserver.dataset import Dataset, Quarantine, build_index, count_tokens
from dataserver.jobs import DatasetMismatchError, JobCache, JobPlanner
from dataserver.planning.job.identity import JobSpecError, canonical_json, parse_job
from dataserver.planning.stream.order import StepOutOfRangeError
from dataserver.planning.stream.samples import ROW_BITS

BYTES = load_tokenizer("bytes", None)
Id = tuple[int, str, int]
"""Epoch, shard and row of a sample."""


@dataclass
class Data:
    """Two datasets: `texts` grew from `before` to `now`, `pairs` has columns."""

    texts: Dataset
    pairs: Dataset
    before: str

    @property
    def by_name(self) -> dict[str, Dataset]:
        """Datasets as they are now."""
        return {"texts": self.texts, "pairs": self.pairs}

    def every(self, name: str, fingerprint: str) -> set[tuple[str, int]]:
        """Shard and row of all samples of a dataset."""
        found = self.by_name[name].as_it_was(fingerprint)
        assert found is not None
        return {(shard.name, row) for shard in found.shards for row in range(shard.num_samples)}


def index(folder: Path) -> Dataset:
    build_index(folder, workers=1)
    count_tokens(folder, BYTES)
    return Dataset.open(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = write_texts(tmp_path_factory.mktemp("texts"), num_samples=22, shard_size=3)
    before = index(folder).fingerprint
    for shard in write_texts(tmp_path_factory.mktemp("more"), num_samples=14, shard_size=4, seed=1).iterdir():
        shard.rename(folder / f"0000{shard.stem[-1]}-more.tar")  # between the others
    pairs = write_pairs(tmp_path_factory.mktemp("pairs"), num_samples=24, shard_size=5)
    return Data(index(folder), index(pairs), before)


def stream(datasets: Sequence[dict[str, Any]], *, packed: bool = False, **changes: Any) -> dict[str, Any]:
    spec = tokenizer_spec(BYTES).model_dump(mode="json")
    return {"datasets": datasets, "tokenizer": spec, "packing": {"enabled": packed}, "seq_len": 512, **changes}


def planner(data: Data, of: dict[str, Any], end: dict[str, Any], cache: JobCache | None = None) -> JobPlanner:
    job = parse_job(job_data(stream=of, execution={"end": end}))
    opened = [data.by_name[spec.name].as_it_was(spec.fingerprint) for spec in job.stream.datasets]
    return JobPlanner(job, [dataset for dataset in opened if dataset is not None], cache)


def continued(jobs: JobPlanner, step: int, **ended: int) -> dict[str, Any]:
    """What a job says that continues another one, as a checkpoint holds it."""
    return {"step": step, "stream": json.loads(canonical_json(jobs.job.stream)), **ended}


def samples(jobs: JobPlanner, step: int) -> list[tuple[str, Id]]:
    """Dataset and sample of a step in canonical order, by the names of shards."""
    found, specs = jobs.samples(step), jobs.job.stream.datasets
    opened = [dataset.shards for dataset in jobs._tables._datasets]
    rows = zip(found.dataset.tolist(), found.epoch.tolist(), found.sample.tolist(), strict=True)
    mask = (1 << ROW_BITS) - 1
    return [(specs[d].name, (e, opened[d][s >> ROW_BITS].name, s & mask)) for d, e, s in rows]


def weights_from(start: int, steps: int) -> st.SearchStrategy[Any]:
    """Weights that never change, or do in some of a stream's steps; some are 0."""
    weight = st.sampled_from(["0", "0.2", "1", "3"])
    later = st.dictionaries(st.integers(start + 1, start + steps + 2), weight, max_size=3)
    changing = st.builds(
        lambda first, rest: [{"from_step": at, "weight": of} for at, of in [(start, first), *sorted(rest.items())]],
        weight,
        later,
    )
    return weight | changing


@st.composite
def chains(draw: st.DrawFn) -> list[tuple[int, dict[str, Any]]]:
    """One to four streams, each with its number of steps: other datasets, weights, packing, windows and seeds."""
    grew, start, found = False, 0, []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.sampled_from([("texts",), ("pairs",), ("texts", "pairs"), ("pairs", "texts")]))
        grew = grew or draw(st.booleans())
        steps = draw(st.integers(1, 5))
        weights = [draw(weights_from(start, steps)) for _ in names[1:]]
        weights.insert(draw(st.integers(0, len(weights))), draw(st.sampled_from(["0.2", "1", "3"])))
        changes = {
            "packed": draw(st.booleans()),
            "seq_len": draw(st.sampled_from([512, 800])),
            "global_batch": draw(st.integers(1, 9)),
            "shuffle_window": draw(st.integers(1, 3)),
            "seed": draw(st.integers(0, 1)),
            "order_version": draw(st.sampled_from([1, 2])),
        }
        found.append((steps, {"names": names, "weights": weights, "grew": grew, **changes}))
        start += steps
    return found


@settings(max_examples=16, deadline=None)
@given(chain=chains())
def test_every_sample_once_an_epoch_over_all_streams(data: Data, chain: list[tuple[int, dict[str, Any]]]) -> None:
    seen: dict[str, list[tuple[Id, str]]] = {"texts": [], "pairs": []}
    start, before = 0, None
    for steps, changes in chain:
        names, weights, grew = changes.pop("names"), changes.pop("weights"), changes.pop("grew")
        prints = {"texts": data.texts.fingerprint if grew else data.before, "pairs": data.pairs.fingerprint}
        entries = [{"name": n, "fingerprint": prints[n], "weight": w} for n, w in zip(names, weights, strict=True)]
        of = stream(entries, **changes, **({} if before is None else {"continues": before}))
        jobs = planner(data, of, {"steps": start + steps})
        again = planner(data, of, {"steps": start + steps}, JobCache(9_000))
        found = {step: samples(again, step) for step in reversed(range(start, start + steps))}
        for step in range(start, start + steps):
            of_step = samples(jobs, step)
            assert of_step == found[step]
            assert changes["packed"] or len(of_step) == changes["global_batch"]
            for name, sample in of_step:
                seen[name].append((sample, prints[name]))
        start += steps
        before = continued(jobs, start)
    for name, of_name in seen.items():
        epochs = [epoch for (epoch, _, _), _ in of_name]
        assert epochs == sorted(epochs)
        assert set(epochs) == set(range(max(epochs, default=-1) + 1))
        for epoch in set(epochs):
            of_epoch = [(shard, row) for (e, shard, row), _ in of_name if e == epoch]
            assert len(set(of_epoch)) == len(of_epoch)
            later = [fingerprint for (e, _, _), fingerprint in of_name if e == epoch + 1]
            if later:
                assert set(of_epoch) == data.every(name, later[0])


@pytest.mark.parametrize("packed", [True, False])
def test_other_weights_leave_the_order_of_each_dataset(data: Data, packed: bool) -> None:
    def entries(*weights: str) -> list[dict[str, Any]]:
        pairs = zip(data.by_name.items(), weights, strict=True)
        return [{"name": name, "fingerprint": dataset.fingerprint, "weight": w} for (name, dataset), w in pairs]

    def order(parts: Sequence[tuple[JobPlanner, range]], name: str) -> list[Id]:
        return [of for jobs, steps in parts for step in steps for n, of in samples(jobs, step) if n == name]

    changes = {"packed": packed, "global_batch": 4, "shuffle_window": 2}
    first = planner(data, stream(entries("1", "1"), **changes), {"steps": 40})
    second = planner(data, stream(entries("1", "5"), **changes, continues=continued(first, 7)), {"steps": 30})
    for name in data.by_name:
        alone, both = order([(first, range(40))], name), order([(first, range(7)), (second, range(7, 30))], name)
        assert both == alone[: len(both)] or both[: len(alone)] == alone
        assert len(both) > 25


def test_filters_and_new_shards_change_what_is_left(data: Data) -> None:
    wide = "width >= 96"
    entry = {"name": "pairs", "fingerprint": data.pairs.fingerprint}
    first = planner(data, stream([entry], global_batch=6), {"epochs": 1})
    had = {of for step in range(2) for _, of in samples(first, step)}
    second = planner(
        data, stream([{**entry, "filter": wide}], global_batch=1, continues=continued(first, 2)), {"epochs": 1}
    )
    left = [of for step in range(2, second.num_steps) for _, of in samples(second, step)]
    shards = {shard.name: shard for shard in data.pairs.shards}
    expected = {
        (0, name, row)
        for name, row in data.every("pairs", data.pairs.fingerprint)
        if shards[name].image(row, 0).width >= 96 and (0, name, row) not in had
    }
    assert len(left) == len(set(left))
    assert set(left) == expected
    assert expected

    old = {"name": "texts", "fingerprint": data.before}
    grown = {"name": "texts", "fingerprint": data.texts.fingerprint}
    first = planner(data, stream([old], global_batch=5), {"epochs": 1})
    second = planner(data, stream([grown], global_batch=5, continues=continued(first, 3)), {"epochs": 2})
    both = [of for jobs, steps in ((first, range(3)), (second, range(3, second.num_steps))) for step in steps
            for _, of in samples(jobs, step)]  # fmt: skip
    every = data.every("texts", data.texts.fingerprint)
    assert sorted(both) == sorted((epoch, *of) for epoch in range(2) for of in every)


@pytest.mark.parametrize("packed", [False, True])
def test_what_a_padded_last_step_left_out_is_read(data: Data, packed: bool) -> None:
    entries = [{"name": "texts", "fingerprint": data.before}, {"name": "pairs", "fingerprint": data.pairs.fingerprint}]
    changes = {"packed": packed, "global_batch": 5}
    first = planner(data, stream(entries, **changes), {"epochs": 1})
    second = planner(
        data, stream(entries, **changes, continues=continued(first, first.num_steps, epochs=1)), {"epochs": 3}
    )
    third = planner(
        data, stream(entries[:1], **changes, continues=continued(second, second.num_steps, epochs=3)), {"epochs": 4}
    )
    assert len(samples(first, first.num_steps - 1)) < len(samples(first, 0))
    steps = [(jobs, step) for jobs in (first, second, third) for step in range(jobs.first_step, jobs.num_steps)]
    found = [of for jobs, step in steps for of in samples(jobs, step)]
    for name, fingerprint, epochs in (("texts", data.before, 4), ("pairs", data.pairs.fingerprint, 3)):
        of_name = [of for n, of in found if n == name]
        assert len(of_name) == len(set(of_name))
        expected = {(epoch, *of) for epoch in range(epochs) for of in data.every(name, fingerprint)}
        assert expected <= set(of_name)
    unsaid = planner(data, stream(entries, **changes, continues=continued(first, first.num_steps)), {"epochs": 3})
    assert any("state stream.continues.epochs: 1;" in note for note in unsaid.notes)
    assert not any("continues.epochs" in note for note in (*first.notes, *second.notes, *third.notes))
    with pytest.raises(
        JobSpecError, match=r"continues.epochs is 1, .* not completed so many epochs of dataset 'texts'"
    ):
        planner(data, stream(entries, continues=continued(first, 2, epochs=1)), {"epochs": 3})


def test_steps_of_the_earlier_stream_and_ends_before_it_are_refused(data: Data) -> None:
    entry = {"name": "pairs", "fingerprint": data.pairs.fingerprint}
    first = planner(data, stream([entry], global_batch=6), {"epochs": 1})
    of = stream([entry], global_batch=6, continues=continued(first, 4))
    second = planner(data, of, {"epochs": 2})
    assert (second.first_step, second.num_steps) == (4, 8)
    with pytest.raises(StepOutOfRangeError, match="step 3 belongs to the stream that this one continues from step 4"):
        second.plan(3)
    assert second.plan(4).step == 4
    with pytest.raises(JobSpecError, match=r"end.steps is 4 and the stream begins with step 4; raise end.steps"):
        planner(data, of, {"steps": 4})
    with pytest.raises(JobSpecError, match=r"completed 1 epochs before step 4, .* raise end.epochs"):
        planner(data, of, {"epochs": 1})


def test_data_that_an_earlier_stream_had_and_that_is_gone_is_named(data: Data) -> None:
    entry = {"name": "pairs", "fingerprint": data.pairs.fingerprint}
    first = planner(data, stream([entry], global_batch=6), {"epochs": 1})
    before = continued(first, 2)
    before["stream"]["datasets"][0]["fingerprint"] = "1" * 64
    with pytest.raises(DatasetMismatchError, match=r"the stream that ends with step 1 \(continues\): dataset 'pairs'"):
        planner(data, stream([entry], continues=before), {"steps": 9})
    before["stream"]["datasets"][0] |= {"fingerprint": data.pairs.fingerprint, "quarantine": "2" * 64}
    with pytest.raises(DatasetMismatchError, match="pins quarantine list 2222"):
        planner(data, stream([entry], continues=before), {"steps": 9})


def test_a_far_step_is_found_at_once(data: Data) -> None:
    entry = {"name": "texts", "fingerprint": data.texts.fingerprint}
    end = {"steps": 2**32 * 12 - 12}  # of 36 samples each epoch
    far = end["steps"] - 9
    first = planner(data, stream([entry], global_batch=3), end)
    second = planner(data, stream([entry], global_batch=3, continues=continued(first, far)), end)
    assert [of for step in range(far, far + 5) for of in samples(second, step)] == [
        of for step in range(far, far + 5) for of in samples(first, step)
    ]


def test_epochs_that_plans_cannot_name_are_refused(data: Data) -> None:
    entry = {"name": "texts", "fingerprint": data.texts.fingerprint}
    most = 2**32 * 12  # steps of 3 of 36 samples
    assert samples(planner(data, stream([entry], global_batch=3), {"steps": most}), most - 1)[0][1][0] == 2**32 - 1
    for end in (most + 1, 2**53 - 1):
        with pytest.raises(
            JobSpecError, match=r"dataset texts would begin more than 4,294,967,295 epochs .* end.steps"
        ):
            planner(data, stream([entry], global_batch=3), {"steps": end})
    first = planner(data, stream([entry], global_batch=3), {"steps": 1})
    for step, batch in ((most, 3), (2**53 - 2, 2**20)):
        before = continued(first, step)
        before["stream"]["global_batch"] = batch
        with pytest.raises(JobSpecError, match="an earlier stream had more than 4,294,967,295 epochs"):
            planner(data, stream([entry], global_batch=3, continues=before), {"steps": 2**53 - 1})


def test_a_dataset_that_an_earlier_stream_took_nothing_of_begins_anew(data: Data) -> None:
    texts = {"name": "texts", "fingerprint": data.texts.fingerprint}
    pairs = {"name": "pairs", "fingerprint": data.pairs.fingerprint}
    nothing = {**pairs, "weight": "0", "filter": "width > 100000"}
    first = planner(data, stream([texts, nothing], global_batch=6), {"steps": 2})
    second = planner(data, stream([pairs], global_batch=6, continues=continued(first, 2)), {"epochs": 1})
    left = [of[1:] for step in range(2, second.num_steps) for _, of in samples(second, step)]
    assert sorted(left) == sorted(data.every("pairs", data.pairs.fingerprint))

    third = planner(data, stream([texts, nothing], global_batch=6, continues=continued(second, 4)), {"steps": 6})
    fourth = planner(data, stream([pairs], global_batch=6, continues=continued(third, 6)), {"epochs": 1})
    assert [samples(fourth, step + 2) for step in (4, 5)] == [samples(second, step) for step in (4, 5)]


def test_chains_that_make_no_sense_are_refused(data: Data) -> None:
    entry = {"name": "texts", "fingerprint": data.texts.fingerprint}
    first = planner(data, stream([entry]), {"steps": 9})
    before = continued(first, 3)

    def refused(continues: dict[str, Any], message: str) -> None:
        with pytest.raises(JobSpecError, match=message):
            planner(data, stream([entry], continues=continues), {"steps": 50})

    refused({**before, "step": 0}, "continues.step: found 0; it should be greater than or equal to 1")
    refused({**before, "step": 2**64}, "continues.step: found 18446744073709551616; it should be less than")
    refused({"step": 3}, "continues.stream: Field required")
    later = {"step": 3, "stream": {**before["stream"], "continues": before}}
    refused(later, "step is 3, and the earlier stream begins with step 3; a later step is required")
    refused({"step": 5, "stream": {**before["stream"], "order_version": 9}}, "pinned to order_version 9")
    del (incomplete := continued(first, 3))["stream"]["datasets"][0]["fingerprint"]
    refused(incomplete, r"continues.stream.datasets.0.fingerprint: Field required")
    chain = before
    for step in range(4, 25):
        chain = {"step": step, "stream": {**before["stream"], "continues": chain}}
    refused(chain, "more than 16 streams continue each other")
    for step in range(25, 200):
        chain = {"step": step, "stream": {**before["stream"], "continues": chain}}
    refused(chain, "recursion limit exceeded")


def test_a_quarantine_list_that_came_later_is_no_obstacle(data: Data, tmp_path: Path) -> None:
    entry = {"name": "pairs", "fingerprint": data.pairs.fingerprint}
    first = planner(data, stream([entry], global_batch=6), {"epochs": 1})
    had = {of for step in range(2) for _, of in samples(first, step)}
    listed = sorted(data.every("pairs", data.pairs.fingerprint) - {of[1:] for of in had})[0]
    file = tmp_path / "bad.jsonl"
    key = f"{listed[0].removesuffix('.tar')}{listed[1]:04d}"
    file.write_text(json.dumps([listed[0], key]) + "\n")
    quarantined = Dataset.open(data.pairs.shards[0].file.path.parent, quarantine=file)
    assert isinstance(quarantined.quarantine, Quarantine)
    now = Data(data.texts, quarantined, data.before)
    entry = {**entry, "quarantine": quarantined.quarantine.digest}
    second = planner(now, stream([entry], global_batch=6, continues=continued(first, 2)), {"epochs": 1})
    left = {of[1:] for step in range(2, second.num_steps) for _, of in samples(second, step)}
    assert left == data.every("pairs", data.pairs.fingerprint) - {of[1:] for of in had} - {listed}
