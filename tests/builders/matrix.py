"""Many small steps of jobs of every layout and policy, the same wherever they are made."""

from random import Random
from typing import Any

import numpy as np
from builders.contrastive import UNIT_BYTES, contrastive_job, tower
from builders.grouped import grouped_data
from builders.jobs import TWO_DATASETS, Data, compose_whole, module
from builders.transfers import transfer

from dataserver.planning.job.identity import Job, parse_job
from dataserver.planning.stream.samples import ShardTable, StepSamples
from dataserver.planning.stream.sizing import concatenate, shard_table, size_samples

BALANCES = ("none", "lpt")
OF_IMAGES = (*BALANCES, "even")
PACKINGS = ("balanced", "best_fit")
ORDERS = ("none", "disttrain", "search")
MAX_PATCHES = 256
SEQ_LEN = 900
Step = tuple[Job, list[ShardTable]]


def matrix(kind: str, number: int) -> Step:
    """A job of a layout's kind, and a shard of each dataset for one of its steps; another one for every number."""
    return _MAKERS[kind](Random(f"{kind} {number}"))


def samples_of(job: Job, tables: list[ShardTable]) -> StepSamples:
    """A step of all samples."""
    return concatenate([size_samples(job.stream, d, 0, t.row.astype(np.uint64), t) for d, t in enumerate(tables)])


def _table(job: Job, draw: Random, count: int, max_images: int) -> ShardTable:
    """A shard of `count` samples: captions of up to 300 tokens, some empty; images of up to 600 x 600."""
    counts = [draw.randint(0, max_images) for _ in range(count)]
    texts = [draw.choice((0, 5, draw.randint(1, 60), draw.randint(1, 300))) for _ in range(count)]
    sides = [[draw.randint(16, 600) for _ in range(sum(counts))] for _ in range(2)]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return shard_table(job.stream, np.arange(count), np.array(texts, np.int64), offsets, *np.array(sides, np.int32))


def _tables(job: Job, draw: Random, count: int, max_images: int) -> list[ShardTable]:
    """A shard of each dataset, of `count` samples together."""
    number = len(job.stream.datasets)
    return [_table(job, draw, (count + position) // number, max_images) for position in range(number)]


def _cost(draw: Random) -> Data:
    return {
        "linear_ps": draw.choice((0, 1_000, 60_000, 900_000)),
        "quadratic_fs": draw.choice((0, 90, 100_000)),
        "microbatch_ns": draw.choice((0, 10_000, 400_000)),
        "backward_percent": draw.choice((0, 100, 200, 233)),
    }


def _memory(draw: Random, kind: str, wide: int = 3) -> Data:
    """Room for the largest sample at least, now and then for less."""
    most = SEQ_LEN if kind == "backbone" else MAX_PATCHES * 3
    return {"memory": {"budget_bytes": 7 * draw.randint(most // 2, wide * most) + 3, "unit_bytes": 7}}


def _module(draw: Random, kind: str, packed: bool, **fields: Any) -> Data:
    """A module with policies of its own; of three, one has memory, and one a cost."""
    found = module(kind, balance=draw.choice(BALANCES if kind == "backbone" else OF_IMAGES), **fields)
    if kind == "backbone":
        found["packing"] = draw.choice(PACKINGS)
    if draw.random() < 0.3 and not (packed and kind == "backbone"):
        found["padded"] = True
    if draw.random() < 0.4:
        found |= _memory(draw, kind)
    if draw.random() < 0.5:
        found["cost"] = _cost(draw)
    return found


def _stream(draw: Random, batch: int, packed: bool, generates: bool) -> Data:
    return {
        "seq_len": SEQ_LEN,
        "global_batch": batch,
        "sizing": {"max_patches": MAX_PATCHES},
        "packing": {"enabled": packed},
        "generation": {"ratio": draw.choice(("0.3", "0.6")) if generates else "0", "query_tokens": draw.randint(1, 64)},
    }


def _transfers(draw: Random, modules: list[Data]) -> Data:
    """Between some of the modules that exchange rows, or none."""
    names = [m["name"] for m in modules]
    stages = next(m.get("pp", 1) for m in modules if m["kind"] == "backbone")
    pairs = [p for p in (("vit", "llm"), ("llm", "dit")) if p[1] in names] + [("llm", "llm")] * (stages > 1)
    chosen = [p for p in pairs if draw.random() < 0.5] if draw.random() < 0.4 else []
    speeds = ("0.7", "3", "50")
    found = [transfer(p, draw.randint(0, 400_000), draw.choice(speeds), draw.randint(0, 3000)) for p in chosen]
    return {"transfers": found} if found else {}


def _pipelined(draw: Random) -> Step:
    packed, microbatch, generates = draw.random() < 0.5, draw.randint(1, 3), draw.random() < 0.5
    dp, pp = draw.randint(1, 4), draw.randint(1, 4)
    batch = dp * microbatch * draw.randint(1, 4)
    modules = [
        _module(draw, "encoder", packed, dp=draw.randint(1, 5)),
        _module(draw, "backbone", packed, dp=dp, pp=pp),
        *([_module(draw, "generator", packed, dp=draw.randint(1, 4))] if generates else []),
    ]
    stream = _stream(draw, batch, packed, generates)
    if draw.random() < 0.3:
        stream["datasets"] = TWO_DATASETS
        modules.append({**_module(draw, "encoder", packed, dp=draw.randint(1, 4)), "name": "other", "datasets": ["x"]})
    schedule = draw.choice(("1f1b", "1f1b", "gpipe", "interleaved"))
    fields = {"1f1b": {"extra_in_flight": draw.choice((None, 0, 1, 2))}, "interleaved": {"chunks": draw.randint(2, 3)}}
    layout = {"kind": "pipelined", "schedule": schedule, "order": draw.choice((*ORDERS, "search"))}
    job = parse_job(
        compose_whole(
            modules,
            **stream,
            **_transfers(draw, modules),
            microbatch=microbatch,
            layout=layout | fields.get(schedule, {}),
        )
    )
    return job, _tables(job, draw, draw.randint(0, 3 * batch if packed else batch), draw.randint(0, 4))


def _grouped(draw: Random) -> Step:
    most, packed, generates = draw.choice((1, 2, 4, 8)), draw.random() < 0.5, draw.random() < 0.5
    batch, dp = draw.randint(1, 24), most * draw.randint(1, 3)
    schedule = draw.choice(("1f1b", "gpipe"))
    groups = {
        "policy": draw.choice(("search", "search", "homogeneous", "static")),
        "min_degree": draw.choice([degree for degree in (1, 2) if degree <= most]),
        "max_degree": most,
        "schedule": schedule,
        "order": draw.choice(ORDERS),
        "extra_in_flight": None if schedule == "gpipe" else draw.choice((None, 0, 2)),
    }
    units = -(-draw.randint(SEQ_LEN, 3 * SEQ_LEN) // most)
    costs = (None, {"linear_ps": 0, "quadratic_fs": 0}, {"linear_ps": 70_000, "quadratic_fs": 90_000})
    degrees = {"encoder": draw.randint(1, 3), "generator": draw.randint(1, 2) if generates else 0}
    stream = _stream(draw, batch, packed, generates)
    data = grouped_data(dp, units, groups, draw.choice(costs), stream=stream, **degrees)
    for found in data["execution"]["modules"]:
        if found["kind"] == "backbone":
            found["packing"] = draw.choice(PACKINGS)
        else:
            found |= {"balance": draw.choice(OF_IMAGES)} | (_memory(draw, "encoder") if draw.random() < 0.4 else {})
    data["execution"] |= _transfers(draw, data["execution"]["modules"])
    job = parse_job(data)
    return job, _tables(job, draw, draw.randint(0, 2 * batch), draw.randint(0, 2))


def _colocated(draw: Random) -> Step:
    packed, microbatch, dp, generates = draw.random() < 0.5, draw.randint(1, 3), draw.randint(1, 6), draw.random() < 0.6
    batch = dp * microbatch * draw.randint(1, 4)
    kinds = ["encoder", "backbone", *(["generator"] if generates else [])]
    modules = [_module(draw, kind, packed, dp=dp) for kind in kinds]
    stream = _stream(draw, batch, packed, generates)
    if draw.random() < 0.3:
        stream["datasets"] = TWO_DATASETS
        modules.append({**_module(draw, "encoder", packed, dp=dp), "name": "other", "datasets": ["x"]})
    layout = {"kind": "colocated", "ranks_per_node": draw.randint(1, 4), "row_bytes": draw.choice((2, 512))}
    job = parse_job(compose_whole(modules, **stream, **_transfers(draw, modules), microbatch=microbatch, layout=layout))
    return job, _tables(job, draw, draw.randint(0, 3 * batch if packed else batch), draw.randint(0, 4))


def _contrastive(draw: Random) -> Step:
    size = draw.randint(1, 3)
    degrees = [draw.randint(1, 3) for _ in range(draw.randint(2, 3))]
    batch = 6 * size * draw.randint(1, 2)
    towers = []
    for number, dp in enumerate(degrees):
        modality = draw.choice(("image", "text"))
        fields: Data = {"dp": dp, "pp": draw.randint(1, 3), "padded": draw.random() < 0.5}
        if draw.random() < 0.5:
            units = draw.randint(1, 4) * batch // dp * (80 if modality == "text" else 64) // 2
            fields["memory"] = {"budget_bytes": units * UNIT_BYTES, "unit_bytes": UNIT_BYTES}
        towers.append(
            tower(f"{modality}-{number}", modality, balance=draw.choice(BALANCES), cost=_cost(draw), **fields)
        )
    schedule = draw.choice(("batch_sync", "distmm_pipe", "distmm_pipe"))
    job = contrastive_job(
        towers,
        batch=batch,
        groups=draw.randint(1, 3),
        microbatches=size,
        schedule=schedule,
        extra_in_flight=0 if schedule == "batch_sync" else draw.randint(0, 2),
        interaction_ns=draw.choice((0, 1_000_000)),
    )
    count = job.stream.global_batch
    sides = [[draw.randint(16, 400) for _ in range(count)] for _ in range(2)]
    texts = np.array([draw.randint(1, 200) for _ in range(count)], np.int64)
    table = shard_table(job.stream, np.arange(count), texts, np.arange(count + 1), *np.array(sides, np.int32))
    return job, [table]


_MAKERS = {"pipelined": _pipelined, "grouped": _grouped, "colocated": _colocated, "contrastive": _contrastive}
