"""Jobs, tables and samples without any file, for the planner's tests."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dataserver.planning.identity import Job, parse_job
from dataserver.planning.jobspec import BalancePolicy, OrderPolicy, PackingPolicy
from dataserver.planning.order import StreamOrder, units_of
from dataserver.planning.samples import I64, ROW_BITS, ShardTable, StepSamples
from dataserver.planning.simulation import Operation, stage_operations
from dataserver.planning.sizing import concatenate, shard_table, size_samples
from dataserver.planning.waves import one_f_one_b_in_flight

TOKENIZER = {
    "name": "bytes",
    "digest": "1" * 64,
    "vocab_size": 300,
    "bos": 256,
    "eos": 257,
    "boi": 258,
    "eoi": 259,
    "image": 260,
    "query": 261,
}


def dataset(name: str = "laion", **changes: Any) -> dict[str, Any]:
    return {"name": name, "fingerprint": "0" * 64, **changes}


TWO_DATASETS = [{"name": n, "fingerprint": "0" * 64} for n in ("laion", "x")]
"""Of a mixture."""

MEMORY = {"room_bytes": 10_000_000, "unit_bytes": 10}


def job_data(
    *,
    stream: dict[str, Any] | None = None,
    execution: dict[str, Any] | None = None,
    encoder: int = 1,
    backbone: tuple[int, int] = (1, 1),
    generator: int = 0,
    balance: str | None = None,
) -> dict[str, Any]:
    """A job's data: degrees of its modules (dp; dp and pp for the backbone; 0 leaves it out), their
    balance, and changed fields."""
    modules: list[dict[str, Any]] = [{"name": "llm", "kind": "backbone", "dp": backbone[0], "pp": backbone[1]}]
    if encoder:
        modules.insert(0, {"name": "vit", "kind": "encoder", "dp": encoder})
    if generator:
        modules.append({"name": "dit", "kind": "generator", "dp": generator})
    if balance is not None:
        modules = [{**m, "balance": balance} for m in modules]
    return {
        "stream": {
            "datasets": [dataset()],
            "tokenizer": TOKENIZER,
            "seq_len": 512,
            "global_batch": backbone[0],
            **(stream or {}),
        },
        "execution": {"modules": modules, "end": {"steps": 10}, **(execution or {})},
    }


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every leaf of a JSON value with its path."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*path, key))
    else:
        yield path, value


def changed(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    copied = copy.deepcopy(data)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def make_job(**arguments: Any) -> Job:
    """`job_data`, parsed."""
    return parse_job(job_data(**arguments))


def make_table(job: Job, rng: np.random.Generator, num_samples: int, max_images: int = 1) -> ShardTable:
    """A synthetic shard: 0..max_images images a sample, captions of 0..300 tokens, some rows left out."""
    counts = rng.integers(0, max_images + 1, num_samples)
    num_images = int(counts.sum())
    return shard_table(
        job.stream,
        np.sort(rng.choice(2 * num_samples + 1, num_samples, replace=False)).astype(np.int64),
        rng.integers(0, 300, num_samples),
        np.concatenate([[0], np.cumsum(counts)]),
        rng.integers(16, 600, num_images).astype(np.int32),
        rng.integers(16, 600, num_images).astype(np.int32),
    )


def make_samples(job: Job, num_samples: int, seed: int = 0, max_images: int = 1) -> StepSamples:
    """Synthetic samples of one step."""
    table = make_table(job, np.random.default_rng(seed), num_samples, max_images)
    return size_samples(job.stream, 0, 0, table.row.astype(np.uint64), table)


class SyntheticDatasets:
    """The shards of a job's datasets as tables, and the order over them; counts which tables are asked for."""

    def __init__(self, job: Job, tables: Sequence[Sequence[ShardTable]]) -> None:
        self.job, self.tables = job, tables
        totals = [np.array([units_of(job.stream, t).sum() for t in shards], np.int64) for shards in tables]
        self.order = StreamOrder(job.stream, job.spec.execution.end, totals)

    def ids(self, step: int) -> list[tuple[int, int, int]]:
        """(dataset, pass, sample) of a step in canonical order."""
        found = []
        for span in self.order.spans(step):
            numbers, _, _ = self.order.select(span, [self.tables[span.dataset][s] for s in span.shards])
            found += [(span.dataset, span.pass_, int(n)) for n in numbers]
        return found

    def samples(self, step: int) -> StepSamples:
        """The sized samples of a step."""
        parts = []
        for span in self.order.spans(step):
            tables = [self.tables[span.dataset][s] for s in span.shards]
            numbers, which, position = self.order.select(span, tables)
            picked = pick(self.job, tables, which, position)
            parts.append(size_samples(self.job.stream, span.dataset, span.pass_, numbers, picked))
        return concatenate(parts)


def pick(job: Job, tables: Sequence[ShardTable], which: I64, position: I64) -> ShardTable:
    """Rows of several tables, one by one."""
    rows = list(zip(which.tolist(), position.tolist(), strict=True))
    images = [(t, i) for t, p in rows for i in range(tables[t].image_offsets[p], tables[t].image_offsets[p + 1])]
    counts = [int(np.diff(tables[t].image_offsets)[p]) for t, p in rows]
    return ShardTable(
        row=np.array([tables[t].row[p] for t, p in rows], np.int64),
        text_tokens=np.array([tables[t].text_tokens[p] for t, p in rows], np.int64),
        image_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        image_rows=np.array([tables[t].image_rows[i] for t, i in images], np.int32),
        image_columns=np.array([tables[t].image_columns[i] for t, i in images], np.int32),
        nominal=np.array([tables[t].nominal[p] for t, p in rows], np.int64),
    )


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int, extra: int = 0) -> list[Operation]:
    """The 1F1B list of one stage."""
    return stage_operations(int(one_f_one_b_in_flight(num_stages, extra)[stage]), num_microbatches)


def sample_number(shard: int, row: int) -> int:
    return (shard << ROW_BITS) | row


@st.composite
def steps(draw: st.DrawFn, several: bool = False, schedules: Sequence[str] = ("1f1b",)) -> tuple[Job, StepSamples]:
    """A pipelined job of any policy with the samples of one of its steps, from none to more than a batch.

    Args:
        draw: hypothesis.
        several: whether modules differ: encoders and generators for each of two datasets, policies, padding and memory
            of their own. Memory holds one sequence of every rank, not always more.
        schedules: those of the layout to draw from.
    """
    packed, microbatch = draw(st.booleans()), draw(st.integers(1, 3))
    dp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = dp * microbatch * draw(st.integers(1, 4))
    generator = draw(st.integers(0, 3))
    stream = {
        "seq_len": SEQ_LEN,
        "global_batch": batch,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": packed},
        "generation": {"ratio": "0.5" if generator else "0", "query_tokens": draw(st.integers(1, 64))},
    }
    degrees = {"encoder": draw(st.integers(1, 4)), "backbone": (dp, pp), "generator": generator}
    execution = {"microbatch": microbatch, "layout": draw(_layouts(schedules))}
    count = draw(st.integers(0, 4 * batch if packed else batch))
    seed, max_images = draw(st.integers(0, 2**32)), draw(st.integers(0, 4))
    if not several:
        job = make_job(stream=stream, execution=execution, balance=draw(st.sampled_from(BalancePolicy)), **degrees)
        return job, make_samples(job, count, seed, max_images)
    data = job_data(stream=stream | {"datasets": TWO_DATASETS}, execution=execution, **degrees)
    data["execution"]["modules"] = draw(_several(data["execution"]["modules"], packed))
    job = parse_job(data)
    return job, mixed_samples(job, count, seed, max_images)


@st.composite
def tight_jobs(draw: st.DrawFn) -> tuple[Job, list[ShardTable]]:
    """A job over two datasets whose modules have little memory, and a shard of each dataset."""
    dp, pp, packed, generator = (
        *(draw(st.integers(1, 3)) for _ in range(2)),
        draw(st.booleans()),
        draw(st.integers(0, 2)),
    )
    stream = {
        "datasets": TWO_DATASETS,
        "seq_len": SEQ_LEN,
        "global_batch": dp,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": packed},
        "generation": {"ratio": "0.5" if generator else "0"},
    }
    layout = draw(_layouts(("1f1b", "gpipe", "interleaved")))
    degrees = {"encoder": draw(st.integers(1, 3)), "backbone": (dp, pp), "generator": generator}
    data = job_data(stream=stream, execution={"layout": layout}, **degrees)
    modules = draw(_several(data["execution"]["modules"], packed))
    for module in modules:
        units = draw(st.integers(200, 900 if module["kind"] == "backbone" else 600))
        module["memory"] = {"room_bytes": units, "unit_bytes": 1}
    data["execution"]["modules"] = modules
    job, rng = parse_job(data), np.random.default_rng(draw(st.integers(0, 2**32)))
    counts, most = draw(st.tuples(st.integers(0, 8), st.integers(0, 8))), draw(st.integers(0, 3))
    return job, [make_table(job, rng, count, most) for count in counts]


SEQ_LEN = 900
"""Of the jobs that `steps` draws: the images of a sequence have 4 x as many patches at most."""


def mixed_samples(job: Job, count: int, seed: int = 0, max_images: int = 1) -> StepSamples:
    """Synthetic samples of all datasets of a job in turn."""
    rng, number = np.random.default_rng(seed), len(job.stream.datasets)
    parts = []
    for position in range(number):
        table = make_table(job, rng, (count + position) // number, max_images)
        parts.append(size_samples(job.stream, position, 0, table.row.astype(np.uint64), table))
    return concatenate(parts)


def _layouts(schedules: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Pipeline layouts of some schedules."""
    order = st.sampled_from(OrderPolicy)
    fields = {
        "1f1b": {"extra_in_flight": st.one_of(st.none(), st.integers(0, 2))},
        "interleaved": {"chunks": st.integers(2, 3)},
    }
    return st.one_of(
        [
            st.fixed_dictionaries(
                {"kind": st.just("pipeline"), "schedule": st.just(s), "order": order, **fields.get(s, {})}
            )
            for s in schedules
        ]
    )


@st.composite
def _several(draw: st.DrawFn, modules: list[dict[str, Any]], packed: bool) -> list[dict[str, Any]]:
    """The modules of a job with a second encoder and generator for the second dataset, and fields of their own."""
    found = []
    for module in modules:
        found.append(module)
        if module["kind"] != "backbone" and draw(st.booleans()):
            other = {**module, "name": f"{module['name']}-x", "dp": draw(st.integers(1, 4)), "datasets": ["x"]}
            found.insert(draw(st.integers(0, len(found))), other)
    return [draw(_policies(module, packed)) for module in found]


@st.composite
def _policies(draw: st.DrawFn, module: dict[str, Any], packed: bool) -> dict[str, Any]:
    """A module with a policy, padding unless it is a backbone that packs, and memory."""
    pads = draw(st.booleans()) and not (packed and module["kind"] == "backbone")
    changes: dict[str, Any] = {"balance": draw(st.sampled_from(BalancePolicy)), "padded": pads}
    if module["kind"] == "backbone":
        changes["packing"] = draw(st.sampled_from(PackingPolicy))
    if draw(st.booleans()):
        changes["memory"] = {"room_bytes": draw(st.integers(4, 12)) * 4 * SEQ_LEN * 4, "unit_bytes": 4}
    return {**module, **changes}
