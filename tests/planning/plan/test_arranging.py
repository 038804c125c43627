"""Which module handles an image, and which of its ranks: by balance, padding and memory."""

from typing import Any

import numpy as np
import pytest
from builders.arranged import arranged_module
from builders.jobs import BALANCES, dataset, make_job
from builders.samples import make_table
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planning.scattered import numbers

from dataserver.planning import I64
from dataserver.planning.balancing import bin_totals
from dataserver.planning.costs.model import forward_ns
from dataserver.planning.job.fields import BalancePolicy, ModuleKind, ModuleSpec
from dataserver.planning.job.identity import Job
from dataserver.planning.plan.arranging import (
    WaveTooLargeError,
    arrange_samples,
    in_order_of,
    module_images,
    spread_images,
)
from dataserver.planning.plan.placement import Placement
from dataserver.planning.stream.samples import StepSamples, Task
from dataserver.planning.stream.sizing import concatenate, size_samples


def encoder(dp: int, units: int | None = None, **fields: Any) -> ModuleSpec:
    memory = None if units is None else {"budget_bytes": units, "unit_bytes": 1}
    return ModuleSpec.model_validate({"name": "vit", "kind": "encoder", "dp": dp, "memory": memory, **fields})


def held(module: ModuleSpec, sizes: I64, rank: I64, wave: I64) -> list[int]:
    """Memory that each rank takes in each wave where it has an image."""
    places = [(rank == r) & (wave == w) for w in np.unique(wave) for r in range(module.dp)]
    return [int(sizes[p].sum() if not module.padded else p.sum() * sizes[p].max(initial=0)) for p in places]


def times(module: ModuleSpec, sizes: I64, rank: I64, wave: I64) -> I64:
    """Forward time of each wave on each rank, without the constant. int64 [waves, dp]."""
    waves = int(wave.max(initial=-1)) + 1
    place = wave * module.dp + rank
    loads = forward_ns(module.cost, sizes)
    return bin_totals(loads, place, waves * module.dp, padded=module.padded).reshape(waves, module.dp)


@st.composite
def waves(draw: st.DrawFn) -> tuple[int, int, int, I64, I64, I64]:
    """Components, encoder ranks and backbone ranks of each, and sizes, backbone ranks and waves of images."""
    components, width, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    images = st.tuples(st.integers(0, components * ranks - 1), st.integers(0, 3), st.integers(4, 400))
    drawn = np.array(draw(st.lists(images, max_size=40)), np.int64).reshape(-1, 3)
    backbone_rank, wave, sizes = drawn[np.lexsort((drawn[:, 1], drawn[:, 0]))].T
    return components, width, ranks, sizes, backbone_rank, wave


@settings(max_examples=150)
@given(waves(), st.sampled_from(BALANCES), st.booleans(), st.integers(1, 12))
def test_every_wave_stays_in_its_component_and_memory(
    case: tuple[int, int, int, I64, I64, I64], balance: BalancePolicy, padded: bool, room: int
) -> None:
    components, width, ranks, sizes, backbone_rank, wave = case
    dp = components * ranks
    free = encoder(components * width, balance=balance, padded=padded)
    rank = spread_images(free, sizes, backbone_rank, wave, dp, components)
    assert np.array_equal(rank // width, backbone_rank // ranks)
    tight = encoder(components * width, 100 * room, balance=balance, padded=padded)
    try:
        within = spread_images(tight, sizes, backbone_rank, wave, dp, components)
    except WaveTooLargeError as error:
        assert str(error).startswith("module vit, wave ")  # noqa: PT017
        assert max(held(tight, sizes, rank, wave)) > 100 * room
        return
    assert np.array_equal(within // width, backbone_rank // ranks)
    assert max(held(tight, sizes, within, wave), default=0) <= 100 * room


@settings(max_examples=60)
@given(waves(), st.booleans())
def test_without_balance_an_image_stays_beside_its_sample(
    case: tuple[int, int, int, I64, I64, I64], padded: bool
) -> None:
    components, width, ranks, sizes, backbone_rank, wave = case
    module = encoder(components * width, balance="none", padded=padded)
    for groups in (1, components):
        rank = spread_images(module, sizes, backbone_rank, wave, components * ranks, groups)
        assert np.array_equal(rank, backbone_rank * module.dp // (components * ranks))


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5), max_size=40), st.integers(1, 12), st.booleans(), st.integers(1, 12))
def test_even_counts_in_every_wave_and_in_all(drawn: list[int], dp: int, padded: bool, room: int) -> None:
    """Neighbours stay together, and the longer runs of a wave begin where those of the wave before end."""
    wave, sizes = np.array(drawn, np.int64), np.full(len(drawn), 100, np.int64)
    zeros = np.zeros_like(wave)
    rank = spread_images(encoder(dp, balance="even", padded=padded), sizes, zeros, wave, 1, 1)
    before = np.zeros(dp, np.int64)
    for number in np.unique(wave):
        mine = rank[wave == number]
        counts = np.bincount(mine, minlength=dp)
        assert counts.max() - counts.min() <= 1
        assert np.count_nonzero(np.diff(mine)) == np.count_nonzero(counts) - 1
        before += counts
        assert before.max() - before.min() <= 1
    tight = encoder(dp, 100 * room, balance="even", padded=padded)
    if max(held(tight, sizes, rank, wave), default=0) > 100 * room:
        with pytest.raises(WaveTooLargeError, match="module vit, wave "):
            spread_images(tight, sizes, zeros, wave, 1, 1)
    else:
        assert np.array_equal(spread_images(tight, sizes, zeros, wave, 1, 1), rank)


@settings(max_examples=100)
@given(waves())
def test_the_heaviest_padded_batch_goes_to_the_rank_that_begins_first(
    case: tuple[int, int, int, I64, I64, I64],
) -> None:
    components, width, ranks, sizes, backbone_rank, wave = case
    module = encoder(components * width, padded=True)
    rank = spread_images(module, sizes, backbone_rank, wave, components * ranks, components)
    finish = np.zeros((components, width), np.int64)
    for of_wave in times(module, sizes, rank, wave).reshape(-1, components, width):
        for component in range(components):
            begin = finish[component]
            order = np.argsort(begin, kind="stable")
            assert (np.diff(of_wave[component][order]) <= 0).all()
        finish += of_wave


def test_padded_waves_gather_images_of_one_size() -> None:
    """Small beside large would cost as much as large: 3 x 400 beside 1 x 100 and 100, not 2 x 400 each."""
    sizes = np.array([400, 100, 400, 100], np.int64)
    zeros = np.zeros(4, np.int64)
    rank = spread_images(encoder(2, padded=True), sizes, zeros, zeros, 1, 1)
    assert rank[0] == rank[2] != rank[1] == rank[3]


def test_padded_batches_are_the_best_there_are() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        sizes = rng.integers(1, 300, 7)
        module, zeros = encoder(2, padded=True), np.zeros(7, np.int64)
        found = times(module, sizes, spread_images(module, sizes, zeros, zeros, 1, 1), zeros).max()
        every = [(np.arange(7) * 0 + [(choice >> i) & 1 for i in range(7)]) for choice in range(128)]
        assert found == min(times(module, sizes, rank, zeros).max() for rank in every)


def test_greedy_that_runs_out_of_memory_is_repaired() -> None:
    """Longest first gives 60 + 50, 50 + 40 and 40 has no room for 110; 60 + 40 and 50 + 50 leave one for 40."""
    sizes = np.array([60, 60, 50, 50, 40, 40], np.int64)
    zeros = np.zeros(6, np.int64)
    module = encoder(3, 100)
    rank = spread_images(module, sizes, zeros, zeros, 1, 1)
    assert max(held(module, sizes, rank, zeros)) == 100


def test_errors_name_module_wave_and_limit() -> None:
    sizes, ones = np.array([300, 200, 200], np.int64), np.ones(3, np.int64)
    with pytest.raises(WaveTooLargeError) as caught:
        spread_images(encoder(2, 300), sizes, 0 * ones, 4 * ones, 1, 1)
    assert str(caught.value) == (
        "module vit, wave 4: its 3 images of 700 patches do not fit 2 ranks with memory for 300 each; take smaller "
        "microbatches, a balance other than none, more ranks, or more memory"
    )
    with pytest.raises(
        WaveTooLargeError, match=r"wave 4: the images of rank 1 have 700 patches, but its memory holds 3"
    ):
        spread_images(encoder(2, 300, balance="none"), sizes, ones, 4 * ones, 2, 1)
    with pytest.raises(
        WaveTooLargeError, match=r"rank 1 have 900 patches, padding included, but its memory holds 899;"
    ):
        spread_images(encoder(2, 899, balance="none", padded=True), sizes, ones, 4 * ones, 2, 1)
    with pytest.raises(WaveTooLargeError, match=r"its 3 images of 700 patches do not fit 2 ranks, padded, with memory"):
        spread_images(encoder(2, 300, padded=True), sizes, ones, 4 * ones, 2, 1)


def test_a_step_of_64000_images_is_the_same_every_time() -> None:
    rng = np.random.default_rng(0)
    sizes, backbone_rank = rng.integers(4, 1024, 64_000), np.sort(rng.integers(0, 128, 64_000))
    wave = np.arange(64_000) % 8
    module = encoder(128)
    first = spread_images(module, sizes, backbone_rank, wave, 128, 1)
    assert np.array_equal(first, spread_images(module, sizes, backbone_rank, wave, 128, 1))
    loads = times(module, sizes, first, wave)
    assert loads.sum(axis=0).max() * 128 <= loads.sum() + 127 * forward_ns(module.cost, sizes).max()


# --- several encoders and generators ----------------------------------------------------------------------------------


def mixture(seed: int, counts: tuple[int, int, int], **execution: Any) -> tuple[Job, StepSamples]:
    """Three datasets, each sample its own sequence; `a` and `c` have encoders and generators of their own."""
    modules = [
        {"name": "vit-a", "kind": "encoder", "dp": 2, "datasets": ["a"]},
        {"name": "vit-rest", "kind": "encoder", "dp": 4},
        {"name": "llm", "kind": "backbone", "dp": 2},
        {"name": "dit-rest", "kind": "generator", "dp": 2},
        {"name": "dit-c", "kind": "generator", "datasets": ["c", "b"]},
    ]
    stream = {
        "datasets": [dataset(n) for n in "abc"],
        "seq_len": 1200,
        "global_batch": 2,
        "sizing": {"max_patches": 256},
        "generation": {"ratio": "0.5", "query_tokens": 3},
    }
    job = make_job(stream=stream, execution={"modules": modules, **execution})
    rng, parts = np.random.default_rng(seed), []
    for number, count in enumerate(counts):
        table = make_table(job, rng, count, 3)
        parts.append(size_samples(job.stream, number, 0, table.row.astype(np.uint64), table))
    return job, concatenate(parts)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))
def test_every_image_has_one_module(seed: int, counts: tuple[int, int, int]) -> None:
    job, samples = mixture(seed, counts)
    found = {
        m.name: module_images(job.spec, m, samples).tolist() for m in job.spec.execution.modules if m.kind != "backbone"
    }
    assert sorted(i for images in found.values() for i in images) == list(range(len(samples.image_rows)))
    for name, images in found.items():
        for i in images:
            sample = samples.image_sample[i]
            assert samples.task[sample] == (Task.UNDERSTANDING if name.startswith("vit") else Task.GENERATION)
            own = {"vit-a": [0], "vit-rest": [1, 2], "dit-rest": [0], "dit-c": [1, 2]}[name]
            assert samples.dataset[sample] in own


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))
def test_routings_of_several_modules_share_the_rows_of_the_backbone(seed: int, counts: tuple[int, int, int]) -> None:
    """Together they fill every row of every backbone microbatch once, each with the image that stands there."""
    job, samples = mixture(seed, counts)
    assume(len(samples))
    spec, sequence = job.spec, np.arange(len(samples))
    rng = np.random.default_rng(seed)
    placement = Placement(rng.integers(0, 2, len(samples)), rng.integers(0, 3, len(samples)), 0 * sequence)
    backbone = arrange_samples(spec.execution.backbone, samples, sequence, placement)
    expected = {
        kind: _rows_in_order(job, samples, backbone, kind) for kind in (ModuleKind.ENCODER, ModuleKind.GENERATOR)
    }
    filled: dict[ModuleKind, dict[tuple[int, int, int], tuple[int, int]]] = {kind: {} for kind in expected}
    for module in spec.execution.modules:
        if module.kind is ModuleKind.BACKBONE:
            continue
        arrangement, routing = arranged_module(spec, module, samples, backbone, 1)
        places = {
            (r, w, s): i
            for i, r, w, s in zip(
                *(a.tolist() for a in (arrangement.item, arrangement.rank, arrangement.microbatch, arrangement.start)),
                strict=True,
            )
        }
        theirs, ours = ("source", "target") if module.kind is ModuleKind.ENCODER else ("target", "source")
        for k, rows in enumerate(routing.rows.tolist()):
            there, here = (
                tuple(int(getattr(routing, f"{side}_{part}")[k]) for part in ("rank", "microbatch", "start"))
                for side in (theirs, ours)
            )
            for row in range(rows):
                key = (here[0], here[1], here[2] + row)
                assert key not in filled[module.kind]
                filled[module.kind][key] = places[there], row
    assert filled == expected


def _rows_in_order(
    job: Job, samples: StepSamples, backbone: Any, kind: ModuleKind
) -> dict[tuple[int, int, int], tuple[int, int]]:
    """(rank, microbatch, row) -> (image, row of the image), as the backbone's view lists its slots."""
    found: dict[tuple[int, int, int], tuple[int, int]] = {}
    end: dict[tuple[int, int], int] = {}
    for item, rank, wave in zip(
        backbone.item.tolist(), backbone.rank.tolist(), backbone.microbatch.tolist(), strict=True
    ):
        if (samples.task[item] == Task.UNDERSTANDING) != (kind is ModuleKind.ENCODER):
            continue
        for image in range(*samples.image_offsets[item : item + 2].tolist()):
            rows = samples.patches[image] // 4 if kind is ModuleKind.ENCODER else job.stream.generation.query_tokens
            for row in range(int(rows)):
                at = end.get((rank, wave), 0)
                found[rank, wave, at] = image, row
                end[rank, wave] = at + 1
    return found


@pytest.mark.parametrize("bits", [(3,), (16,), (17,), (40,), (2, 3), (9, 9), (16, 17), (20, 20, 20)])
def test_orders_by_keys_of_any_size(bits: tuple[int, ...]) -> None:
    """Sixteen bits are sorted at a time."""
    keys = [numbers(seed, 3_000, 0, (1 << n) - 1) for seed, n in enumerate(bits)]
    keys[0][::5] = keys[0][0]
    assert in_order_of(*keys).tolist() == np.lexsort(keys[::-1]).tolist()
    assert in_order_of(*(key[:0] for key in keys)).tolist() == []


@settings(max_examples=60)
@given(waves(), st.sampled_from([None, 400, 700]))
def test_lpt_is_its_definition(case: tuple[int, int, int, I64, I64, I64], units: int | None) -> None:
    """Wave by wave the longest image first, equal ones as they come, to the rank of its component that has done most
    early, of those whose memory has room."""
    components, width, ranks, sizes, backbone_rank, wave = case
    assume(width > 1)
    module = encoder(components * width, units, balance=BalancePolicy.LPT)
    loads = forward_ns(module.cost, sizes).tolist()
    finish, used, expected = [0] * module.dp, dict.fromkeys(range(0), 0), [-1] * len(loads)
    for i in sorted(range(len(loads)), key=lambda i: (wave[i], -loads[i], i)):
        first = int(backbone_rank[i] * components // (components * ranks)) * width
        room = [
            r for r in range(first, first + width) if units is None or used.get((wave[i], r), 0) + sizes[i] <= units
        ]
        assume(room)
        chosen = min(room, key=lambda r: finish[r])
        finish[chosen] += loads[i]
        used[wave[i], chosen] = used.get((wave[i], chosen), 0) + sizes[i]
        expected[i] = chosen
    assert spread_images(module, sizes, backbone_rank, wave, components * ranks, components).tolist() == expected
