"""Whole plans of random steps: nothing lost, equal counts, routings that cover both sides, queues that never block."""

import json
import queue
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning.builders import SyntheticDatasets, dataset, make_job, make_samples

from dataserver.planning.expectation import imbalance, module_loads, timeline
from dataserver.planning.identity import Job
from dataserver.planning.jobspec import BalancePolicy, ModuleKind, OrderPolicy
from dataserver.planning.pipeline import Node, OperationKind, stage_operations
from dataserver.planning.plan import Arrangement, Routing, StepPlan, plan_hash
from dataserver.planning.planner import explain, plan_step
from dataserver.planning.samples import ShardTable, StepSamples, Task
from dataserver.planning.sizing import concatenate, shard_table
from dataserver.planning.views import view_plan

GOLDEN = Path(__file__).with_name("golden.json")


@st.composite
def steps(draw: st.DrawFn) -> tuple[Job, StepSamples]:
    """A job of any layout and policy with the samples of one of its steps, from none to more than a batch."""
    packed, microbatch = draw(st.booleans()), draw(st.integers(1, 3))
    dp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    batch = dp * microbatch * draw(st.integers(1, 4))
    generator = draw(st.integers(0, 3))
    stream = {
        "seq_len": 900,
        "global_batch": batch,
        "sizing": {"max_patches": 256},
        "packing": {"enabled": packed},
        "generation": {"ratio": "0.5" if generator else "0", "query_tokens": draw(st.integers(1, 64))},
    }
    policies = {"balance": draw(st.sampled_from(BalancePolicy)), "order": draw(st.sampled_from(OrderPolicy))}
    execution = {"microbatch": microbatch, "policies": policies}
    job = make_job(
        stream=stream, execution=execution, encoder=draw(st.integers(1, 4)), backbone=(dp, pp), generator=generator
    )
    count = draw(st.integers(0, 4 * batch if packed else batch))
    return job, make_samples(job, count, draw(st.integers(0, 2**32)), draw(st.integers(0, 4)))


def planned(step: tuple[Job, StepSamples]) -> tuple[Job, StepPlan]:
    job, samples = step
    return job, plan_step(job, 3, samples)


@settings(max_examples=120, deadline=None)
@given(steps())
def test_no_policy_touches_the_samples(step: tuple[Job, StepSamples]) -> None:
    job, plan = planned(step)
    assert plan.samples is step[1]
    assert sorted(plan.arrangement("llm").item.tolist()) == list(range(len(step[1])))
    for module in job.spec.execution.modules:
        if module.kind is ModuleKind.BACKBONE:
            continue
        task = Task.UNDERSTANDING if module.kind is ModuleKind.ENCODER else Task.GENERATION
        images = np.flatnonzero(step[1].task[step[1].image_sample] == task)
        assert sorted(plan.arrangement(module.name).item.tolist()) == images.tolist()
    assert [a.module for a in plan.arrangements] == [m.name for m in job.spec.execution.modules]


@settings(max_examples=120, deadline=None)
@given(steps())
def test_counts_slots_and_lengths(step: tuple[Job, StepSamples]) -> None:
    job, plan = planned(step)
    execution, backbone = job.spec.execution, plan.arrangement("llm")
    slots = execution.backbone.dp * execution.microbatch
    assert plan.sequences_per_microbatch == execution.microbatch
    assert plan.num_microbatches >= job.stream.global_batch // slots
    tokens: Counter[tuple[int, int, int]] = Counter()
    held: Counter[tuple[int, int, int]] = Counter()
    for i, item in enumerate(backbone.item):
        place = int(backbone.rank[i]), int(backbone.microbatch[i]), int(backbone.slot[i])
        tokens[place] += int(plan.samples.tokens[item])
        held[place] += 1
    assert all(0 <= r < execution.backbone.dp for r, _, _ in tokens)
    assert all(0 <= m < plan.num_microbatches for _, m, _ in tokens)
    assert all(0 <= s < execution.microbatch for _, _, s in tokens)
    assert all(n <= job.stream.seq_len for n in tokens.values())
    assert job.stream.packing.enabled or set(held.values()) <= {1}
    # Every rank has room for the same number of sequences, and no more microbatches are run than the packer needs.
    needed = max(job.stream.global_batch, len(tokens))
    assert plan.num_microbatches == -(-needed // slots)


@settings(max_examples=120, deadline=None)
@given(steps())
def test_waves_and_starts(step: tuple[Job, StepSamples]) -> None:
    job, plan = planned(step)
    backbone = plan.arrangement("llm")
    wave_of_sample = dict(zip(backbone.item.tolist(), backbone.microbatch.tolist(), strict=True))
    sizes = {"llm": plan.samples.tokens, "vit": plan.samples.patches // 4}
    for arrangement in plan.arrangements:
        order = np.lexsort((arrangement.start, arrangement.microbatch, arrangement.rank))
        assert order.tolist() == list(range(len(order)))
        if arrangement.module != "llm":
            for item, wave in zip(arrangement.item.tolist(), arrangement.microbatch.tolist(), strict=True):
                assert wave == wave_of_sample[int(plan.samples.image_sample[item])]
        rows = sizes.get(arrangement.module, np.full(len(plan.samples.patches), job.stream.generation.query_tokens))
        expected: Counter[tuple[int, int]] = Counter()
        for i, item in enumerate(arrangement.item.tolist()):
            key = int(arrangement.rank[i]), int(arrangement.microbatch[i])
            assert arrangement.start[i] == expected[key]
            expected[key] += int(rows[item])


def covered(routing: Routing, side: str) -> dict[tuple[int, int], list[int]]:
    """For each (rank, wave) of one side the rows that the routing names, sorted."""
    rows: dict[tuple[int, int], list[int]] = {}
    ranks, starts = getattr(routing, f"{side}_rank"), getattr(routing, f"{side}_start")
    for rank, wave, start, count in zip(ranks, routing.microbatch, starts, routing.rows, strict=True):
        rows.setdefault((int(rank), int(wave)), []).extend(range(int(start), int(start + count)))
    return {key: sorted(found) for key, found in rows.items()}


@settings(max_examples=120, deadline=None)
@given(steps())
def test_routings_are_bijections_of_rows(step: tuple[Job, StepSamples]) -> None:
    job, plan = planned(step)
    backbone = plan.arrangement("llm")
    others = [m for m in job.spec.execution.modules if m.name != "llm"]
    assert {(r.source_module, r.target_module) for r in plan.routings} == {
        (m.name, "llm") if m.kind is ModuleKind.ENCODER else ("llm", m.name) for m in others
    }
    for routing in plan.routings:
        into = routing.target_module == "llm"
        other = plan.arrangement(routing.source_module if into else routing.target_module)
        side, other_side = ("target", "source") if into else ("source", "target")
        rows = {i: _rows(job, plan, i, into) for i in other.item.tolist()}
        totals: Counter[tuple[int, int]] = Counter()
        for item, rank, wave in zip(other.item, other.rank, other.microbatch, strict=True):
            totals[int(rank), int(wave)] += rows[int(item)]
        found = covered(routing, other_side)
        assert found == {key: list(range(total)) for key, total in totals.items()}
        # The backbone's rows: images of its samples, sample after sample in the order of the view.
        task = Task.UNDERSTANDING if into else Task.GENERATION
        places: dict[int, tuple[int, int, int]] = {}
        filled: Counter[tuple[int, int]] = Counter()
        for sample, rank, wave in zip(backbone.item, backbone.rank, backbone.microbatch, strict=True):
            if plan.samples.task[sample] == task:
                for image in range(*plan.samples.image_offsets[sample : sample + 2].tolist()):
                    places[image] = int(rank), int(wave), filled[int(rank), int(wave)]
                    filled[int(rank), int(wave)] += rows[image]
        assert covered(routing, side) == {key: list(range(total)) for key, total in filled.items()}
        # Entry by entry: the same image on both sides.
        here = dict(zip(places.values(), places.keys(), strict=True))
        there = {
            (int(r), int(m), int(s)): int(i)
            for i, r, m, s in zip(other.item, other.rank, other.microbatch, other.start, strict=True)
        }
        ours, theirs = (
            (getattr(routing, f"{side}_rank"), getattr(routing, f"{side}_start")),
            (
                getattr(routing, f"{other_side}_rank"),
                getattr(routing, f"{other_side}_start"),
            ),
        )
        for k, (wave, count) in enumerate(zip(routing.microbatch.tolist(), routing.rows.tolist(), strict=True)):
            image = here[int(ours[0][k]), wave, int(ours[1][k])]
            assert image == there[int(theirs[0][k]), wave, int(theirs[1][k])]
            assert count == rows[image]
        order = np.lexsort((routing.source_start, routing.source_rank, routing.microbatch))
        assert order.tolist() == list(range(len(order)))


def _rows(job: Job, plan: StepPlan, image: int, into: bool) -> int:
    return int(plan.samples.patches[image]) // 4 if into else job.stream.generation.query_tokens


@settings(max_examples=80, deadline=None)
@given(steps())
def test_views_cover_the_plan_once(step: tuple[Job, StepSamples]) -> None:
    job, plan = planned(step)
    for module in job.spec.execution.modules:
        arrangement = plan.arrangement(module.name)
        views = [
            view_plan(job.spec, plan, module.name, rank, wave)
            for rank in range(module.dp)
            for wave in range(plan.num_microbatches)
        ]
        assert np.array_equal(np.concatenate([v.items for v in views]), arrangement.item)
        assert np.array_equal(np.concatenate([v.slots for v in views]), arrangement.slot)
        assert np.array_equal(np.concatenate([v.starts for v in views]), arrangement.start)
        for number, routing in enumerate(r for r in plan.routings if module.name in (r.source_module, r.target_module)):
            mine = [v.routings[number] for v in views]
            assert sum(len(r.rows) for r in mine) == len(routing.rows)
            assert sorted(_entries(mine)) == sorted(_entries([routing]))
    with pytest.raises(ValueError, match=r"rank \d+ of module llm does not exist; its dp is \d+"):
        view_plan(job.spec, plan, "llm", job.spec.execution.backbone.dp, 0)
    with pytest.raises(ValueError, match=r"microbatch \d+ does not exist; step 3 has \d+"):
        view_plan(job.spec, plan, "llm", 0, plan.num_microbatches)
    with pytest.raises(ValueError, match=r"module 'nobody' is not in the job; it has \["):
        view_plan(job.spec, plan, "nobody", 0, 0)


def _entries(routings: list[Routing]) -> list[tuple[int, ...]]:
    names = ("microbatch", "source_rank", "source_start", "target_rank", "target_start", "rows")
    return [entry for r in routings for entry in zip(*(getattr(r, n).tolist() for n in names), strict=True)]


@settings(max_examples=60, deadline=None)
@given(steps())
def test_denominators_are_the_targets_of_the_step(step: tuple[Job, StepSamples]) -> None:
    _, plan = planned(step)
    samples = plan.samples
    text = patches = 0
    for i in range(len(samples)):
        if samples.task[i] == Task.UNDERSTANDING:
            text += int(samples.text_tokens[i]) + 1  # EOS is a target too
        else:
            patches += int(samples.patches[samples.image_offsets[i]])
    assert (plan.text_tokens, plan.target_patches) == (text, patches)


# --- queues ---------------------------------------------------------------------------------------------------------

Channel = tuple[int, int, OperationKind]


def joined_nodes(job: Job, plan: StepPlan) -> tuple[list[Node], int]:
    """The pipeline of a plan, built from the views alone: which rank of which stage feeds which in every wave."""
    modules = sorted(job.spec.execution.modules, key=lambda m: list(ModuleKind).index(m.kind))
    names = [(m.name, s, r) for m in modules for s in range(m.pp) for r in range(m.dp)]
    stages = [(m.name, s) for m in modules for s in range(m.pp)]
    nodes = []
    for name, stage, rank in names:
        last = stage == job.spec.execution.module(name).pp - 1
        feeds: list[set[int]] = [set() for _ in range(plan.num_microbatches)]
        for wave in range(plan.num_microbatches):
            if not last:
                feeds[wave].add(names.index((name, stage + 1, rank)))
            for routing in view_plan(job.spec, plan, name, rank, wave).routings if last else ():
                if routing.source_module == name:
                    feeds[wave] |= {names.index((routing.target_module, 0, r)) for r in routing.target_rank.tolist()}
        zeros = np.zeros(plan.num_microbatches, np.int64)
        fed = tuple(tuple(sorted(f)) for f in feeds)
        nodes.append(Node(stages.index((name, stage)), zeros, zeros, fed))
    return nodes, len(stages)


def run_node(number: int, nodes: list[Node], num_stages: int, queues: dict[Channel, queue.Queue[int]]) -> int:
    """Run one node's list: take from every channel of the wave, then give to every channel of the wave."""
    feeds = nodes[number].feeds
    waves = len(feeds)
    sources = [[m for m, node in enumerate(nodes) if number in node.feeds[w]] for w in range(waves)]
    done = 0
    for operation in stage_operations(nodes[number].stage, num_stages, waves):
        forward, wave = operation.kind is OperationKind.FORWARD, operation.microbatch
        gives, takes = (feeds[wave], sources[wave]) if forward else (sources[wave], feeds[wave])
        for other in takes:
            assert queues[other, number, operation.kind].get(timeout=20) == wave
        for other in gives:
            queues[number, other, operation.kind].put(wave, timeout=20)
        done += 1
    return done


@settings(max_examples=40, deadline=None)
@given(steps())
def test_every_plan_finishes_on_bounded_queues(step: tuple[Job, StepSamples]) -> None:
    """Law 7: one thread for each node, and room for a single message between any two. A deadlock would time out."""
    job, plan = planned(step)
    nodes, num_stages = joined_nodes(job, plan)
    channels = {(n, m, k) for n, node in enumerate(nodes) for fed in node.feeds for m in fed for k in OperationKind}
    queues: dict[Channel, queue.Queue[int]] = {
        ((n, m, k) if k is OperationKind.FORWARD else (m, n, k)): queue.Queue(maxsize=1) for n, m, k in channels
    }
    finished = [0] * len(nodes)

    def run(number: int) -> None:
        finished[number] = run_node(number, nodes, num_stages, queues)

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert finished == [2 * plan.num_microbatches] * len(nodes)
    assert all(q.empty() for q in queues.values())
    # The simulator joins the same nodes in the same way.
    assert timeline(job.spec, plan).num_stages == num_stages


# --- what balancing is for ------------------------------------------------------------------------------------------


def test_policies_make_a_skewed_step_faster_and_never_slower() -> None:
    gains = []
    for seed in range(8):
        job = make_job(stream={"global_batch": 48, "seq_len": 2048, "packing": {"enabled": False}}, backbone=(4, 2))
        plan = plan_step(job, 0, make_samples(job, 48, seed, 3))
        summary = explain(job, plan)
        assert summary.after.makespan_ns <= summary.before.makespan_ns
        assert sum(summary.loads_after["llm"].tolist()) == sum(summary.loads_before["llm"].tolist())
        gains.append(summary.before.makespan_ns - summary.after.makespan_ns)
        loads = module_loads(job.spec, plan)
        assert imbalance(loads["llm"].tolist()) <= imbalance(summary.loads_before["llm"].tolist())
    assert sum(gains) > 0


def test_policies_none_deal_the_samples_out_in_canonical_order() -> None:
    policies = {"balance": "none", "order": "none"}
    job = make_job(
        stream={"global_batch": 8, "packing": {"enabled": False}}, execution={"policies": policies}, backbone=(2, 1)
    )
    plan = plan_step(job, 0, make_samples(job, 8))
    backbone = plan.arrangement("llm")
    assert backbone.item.tolist() == list(range(8))
    assert backbone.rank.tolist() == [0] * 4 + [1] * 4
    assert backbone.microbatch.tolist() == [0, 1, 2, 3] * 2


def test_a_step_without_samples_has_a_plan() -> None:
    for packed in (False, True):
        job = make_job(stream={"global_batch": 4, "packing": {"enabled": packed}}, generator=2, backbone=(2, 2))
        plan = plan_step(job, 0, concatenate([]))
        assert (plan.num_microbatches, plan.text_tokens, plan.target_patches) == (2, 0, 0)
        assert timeline(job.spec, plan).makespan_ns > 0


def test_one_microbatch_more_where_the_packer_needs_it() -> None:
    # Six samples of 70 % of a sequence do not fit the four planned sequences.
    job = make_job(stream={"global_batch": 4, "seq_len": 100}, backbone=(2, 1))
    samples = make_samples(make_job(stream={"seq_len": 100}), 6, 0, 0)
    samples = replace(samples, tokens=np.full(6, 70, np.int64), text_tokens=np.full(6, 68, np.int64))
    assert plan_step(job, 0, samples).num_microbatches == 3


# --- identity of plans ----------------------------------------------------------------------------------------------


def hash_again(plan: StepPlan, **changes: object) -> bytes:
    names = ("job_id", "step", "samples", "num_microbatches", "arrangements", "routings")
    return plan_hash(**{n: changes.get(n, getattr(plan, n)) for n in names})


def sample_plan() -> StepPlan:
    job = make_job(
        stream={"global_batch": 8, "seq_len": 900, "generation": {"ratio": "0.5"}},
        encoder=2,
        backbone=(2, 2),
        generator=2,
    )
    return plan_step(job, 5, make_samples(job, 30, 1, 2))


def test_the_hash_covers_everything() -> None:
    plan = sample_plan()
    hashes = {plan.hash, hash_again(plan, job_id="0" * 64), hash_again(plan, step=6)}
    assert hash_again(plan) == plan.hash
    hashes.add(hash_again(plan, num_microbatches=plan.num_microbatches + 1))
    hashes.add(hash_again(plan, routings=plan.routings[::-1]))
    expected = 5
    groups: dict[str, tuple[StepSamples | Arrangement | Routing, ...]] = {
        "samples": (plan.samples,),
        "arrangements": plan.arrangements,
        "routings": plan.routings,
    }
    for name, parts in groups.items():
        for number, part in enumerate(parts):
            for field in fields(part):
                value = getattr(part, field.name)
                other = value + "x" if isinstance(value, str) else _bumped(value)
                changed = (*parts[:number], replace(part, **{field.name: other}), *parts[number + 1 :])
                hashes.add(hash_again(plan, **{name: changed[0] if name == "samples" else changed}))
                expected += 1
    assert expected == 5 + 10 + 3 * 6 + 2 * 8
    assert len(hashes) == expected


def _bumped(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed[-1] += 1
    return changed


def test_every_part_of_a_plan_is_hashed() -> None:
    """A new field of a plan must enter its hash or follow from what does."""
    assert {f.name for f in fields(StepPlan)} == {
        "job_id", "step", "samples", "num_microbatches", "arrangements", "routings",  # hashed
        "stream_id", "sequences_per_microbatch",  # follow from the job
        "text_tokens", "target_patches",  # follow from the samples
        "hash",
    }  # fmt: skip


def test_another_process_makes_the_same_plan() -> None:
    code = "from planning.test_planner import sample_plan; print(sample_plan().hash.hex())"
    tests = Path(__file__).resolve().parents[1]
    for seed in ("0", "4711"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{tests}:{tests.parent}"}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        assert result.stdout.strip() == sample_plan().hash.hex()


# Golden order and plans of a fixed job. If `order` below changes, the change is order-breaking and must raise
# order_version; if only `plans` change, it is plan-breaking and must raise plan_version: a running job that is resumed
# by a new release would otherwise see other samples, or servers of two releases would disagree about one step.
# Rewrite the file with `python -m planning.test_planner` from tests/, together with the raised version.


def golden_job() -> Job:
    return make_job(
        stream={
            "datasets": [dataset("laion", weight="0.7"), dataset("obelics", weight="0.3")],
            "seq_len": 1024,
            "global_batch": 16,
            "generation": {"ratio": "0.25"},
            "shuffle_window": 2,
            "seed": 42,
        },
        execution={"microbatch": 2, "end": {"passes": 2}},
        encoder=3,
        backbone=(2, 2),
        generator=2,
    )


def golden_table(job: Job, num_samples: int, max_images: int) -> ShardTable:
    """A shard by arithmetic alone: numpy may change its distributions between releases."""
    rows = np.arange(num_samples, dtype=np.int64)
    counts = rows * 5 % (max_images + 1)
    images = np.arange(int(counts.sum()), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return shard_table(job.stream, rows, rows * 83 % 311, offsets, 16 + images * 197 % 907, 16 + images * 331 % 601)


def golden() -> dict[str, object]:
    job = golden_job()
    sizes = (((90, 0, 70, 80), 1), ((40, 50), 3))
    tables = [[golden_table(job, n, images) for n in shards] for shards, images in sizes]
    data = SyntheticDatasets(job, tables)
    found = {step: data.samples(step) for step in (0, 1, 7)}
    plans = {step: plan_step(job, step, samples) for step, samples in found.items()}
    return {
        "order_version": job.stream.order_version,
        "plan_version": job.spec.execution.plan_version,
        "job_id": job.job_id,
        "num_steps": data.order.num_steps,
        "order": {str(step): [list(sample) for sample in data.ids(step)] for step in found},
        "plans": {
            str(step): {
                "hash": plan.hash.hex(),
                "num_microbatches": plan.num_microbatches,
                "backbone": [
                    plan.arrangement("llm").item.tolist(),
                    plan.arrangement("llm").rank.tolist(),
                    plan.arrangement("llm").microbatch.tolist(),
                ],
                "text_tokens": plan.text_tokens,
                "target_patches": plan.target_patches,
                "makespan_ns": timeline(job.spec, plan).makespan_ns,
            }
            for step, plan in plans.items()
        },
    }


def test_golden_order_and_plans() -> None:
    expected, found = json.loads(GOLDEN.read_text()), golden()
    assert found["order"] == expected["order"], "order-breaking: raise order_version"
    assert found == expected, "plan-breaking: raise plan_version"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden(), separators=(",", ":")) + "\n")
