"""What is refused before a job begins, because no plan could hold it."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders.jobs import dataset, make_job
from builders.samples import make_table
from hypothesis import given, settings
from hypothesis import strategies as st

from dataserver.planning import yielding_to
from dataserver.planning.job.identity import Job
from dataserver.planning.layouts.interface import layout_of
from dataserver.planning.layouts.shared.limits import together
from dataserver.planning.stream.columns import ShardColumns
from dataserver.planning.stream.samples import ShardTable, Task
from dataserver.planning.stream.sizing import SampleTooLargeError, most_tokens, shard_table, size_samples
from dataserver.planning.stream.statistics import row_statistics

WHERE = "dataset laion, shard 00000.tar"


def columns(samples: list[tuple[int, list[int]]]) -> ShardColumns:
    """Samples of so many text tokens and images of so many patches (a multiple of 4)."""
    widths = np.array([28 * patches // 4 for _, images in samples for patches in images], np.int32)
    return ShardColumns(
        text_offsets=np.arange(len(samples) + 1),
        text_tokens=np.array([text for text, _ in samples], np.int64),
        image_offsets=np.append(0, np.cumsum([len(images) for _, images in samples])),
        image_width=widths,
        image_height=np.full_like(widths, 28),
    )


def table(job: Job, samples: list[tuple[int, list[int]]]) -> ShardTable:
    """These samples, in rows 10, 20, 30, ..."""
    found, row = columns(samples), 10 * (1 + np.arange(len(samples)))
    return shard_table(job.stream, row, found.text_tokens, found.image_offsets, found.image_width, found.image_height)


def check(job: Job, *samples: tuple[int, list[int]], dataset: int = 0) -> None:
    layout_of(job.spec.execution).limits(job.spec).add(dataset, table(job, list(samples)), WHERE)


def refused(job: Job, *samples: tuple[int, list[int]], dataset: int = 0) -> str:
    with pytest.raises(ValueError, match=re.escape(WHERE)) as caught:
        check(job, *samples, dataset=dataset)
    return str(caught.value)


def with_module(number: int, changes: dict[str, Any], **arguments: Any) -> Job:
    """A job with encoder, backbone and generator, one of them with other fields."""
    modules: list[dict[str, Any]] = [
        {"name": "vit", "kind": "encoder"},
        {"name": "llm", "kind": "backbone", "dp": arguments.pop("dp", 1)},
        {"name": "dit", "kind": "generator"},
    ]
    modules[number] |= changes
    execution = {"modules": modules, **arguments.pop("execution", {})}
    return make_job(execution=execution, **arguments)


def memory(units: int) -> dict[str, Any]:
    return {"memory": {"budget_bytes": 10 * units + 9, "unit_bytes": 10}}


def test_others_may_plan_between_samples_whose_images_may_not_fit_together() -> None:
    found = table(make_job(), [(9, [16, 16]), (9, [48]), (9, [24, 24]), (9, [40, 8])])
    turns: list[int] = []
    with yielding_to(lambda: turns.append(0)):
        module = make_job().spec.execution.modules[0]
        assert [i for i, _, _ in together(module, found, np.ones(4, np.bool_), 40)] == [2, 3]
    assert len(turns) == 2


def test_videos_of_a_sample_are_spread_by_their_groups_of_frames() -> None:
    """As plans spread them: groups do not attend to each other, so that a long video may cost less than a large one."""
    found = replace(table(make_job(), [(9, [16]), (9, [32, 16])]), image_depths=np.array([1, 8, 2], np.int32))
    module = make_job().spec.execution.modules[0]
    ((number, sizes, depths),) = together(module, found, np.ones(2, np.bool_), 40)
    assert depths is not None
    assert (number, sizes.tolist(), depths.tolist()) == (1, [32, 16], [8, 2])


def test_images_need_an_encoder_unless_all_are_targets() -> None:
    for ratio, text, fits in (("1", 5, True), ("1", 0, False), ("0.999", 5, False), ("0", 5, False)):
        job = make_job(stream={"generation": {"ratio": ratio}}, encoder=0, generator=1)
        check(job, (text, []))
        if fits:
            check(job, (text, [16]))
        else:
            assert refused(job, (9, []), (text, [16]), (0, [4, 4])) == (
                f"{WHERE}, row 20: the sample has images to understand (2 such samples in this shard) but no module of "
                "kind encoder handles dataset laion; add one, name the dataset in the datasets of one, or leave such "
                "samples out with a filter or a quarantine list"
            )


def two_datasets(kind: str, ratio: str) -> Job:
    """A job whose only module of a kind handles the second of two datasets."""
    modules = [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}]
    modules.append({"name": "dit", "kind": "generator"})
    modules = [{**m, "datasets": ["other"]} if m["kind"] == kind else m for m in modules]
    stream = {"datasets": [dataset("laion"), dataset("other")], "generation": {"ratio": ratio}}
    return make_job(stream=stream, execution={"modules": modules})


def test_every_dataset_needs_an_encoder_and_a_generator_of_its_own() -> None:
    job = two_datasets("encoder", "0")
    check(job, (5, [16]), dataset=1)
    check(job, (5, []))
    assert "row 10: the sample has images to understand" in refused(job, (5, [16]))
    job = two_datasets("generator", "0.25")
    check(job, (5, [16]), dataset=1)
    check(job, (5, [16, 16]), (0, [16]), (5, []))  # no pairs, so never generated
    assert (
        "row 20: the sample has images to generate (1 such samples in this shard) but no module of kind generator"
        in (refused(job, (0, [16]), (5, [16])))
    )
    check(two_datasets("generator", "0"), (5, [16]))


def test_an_image_must_fit_the_memory_of_its_encoder() -> None:
    job = with_module(0, {"dp": 3, **memory(100)}, stream={"generation": {"ratio": "0.5"}})
    check(job, (5, [100]), (0, [100] * 3))
    assert refused(job, (5, [100]), (5, [104, 4]), (0, [4, 116, 4])) == (
        f"{WHERE}, row 30: it has 116 patches of an image, but the memory of a rank of module vit holds 100 (2 too "
        "large in this shard); raise memory.budget_bytes of the module, lower stream.sizing.max_patches, or leave such "
        "samples out with a filter or a quarantine list"
    )
    check(with_module(0, memory(100), stream={"generation": {"ratio": "1"}}), (5, [104]))  # a target only


def test_under_a_rule_the_field_to_lower_is_one_that_the_job_may_set() -> None:
    stream = {"seq_len": 2048, "sizing": {"rule": "square", "side": 280}}  # 20 x 20 patches
    job = with_module(0, {"dp": 2, **memory(399)}, stream=stream)
    assert "raise memory.budget_bytes of the module, lower stream.sizing.side, or" in refused(job, (5, [16]))
    several = with_module(0, {"dp": 2, **memory(400)}, stream=stream)
    check(several, (5, [16] * 2))
    assert "dp of the module, lower stream.sizing.side, or leave such samples out" in refused(several, (5, [16] * 3))


def test_a_target_must_fit_the_memory_of_its_generator() -> None:
    job = with_module(2, memory(100), stream={"generation": {"ratio": "0.5"}})
    check(job, (5, [100]), (0, [104]), (5, [104, 104]))
    assert "row 20: it has 104 patches of an image, but the memory of a rank of module dit holds 100" in (
        refused(job, (5, [4]), (5, [104]))
    )
    check(with_module(2, memory(100)), (5, [104]))  # nothing is generated


def test_a_sample_must_fit_the_memory_of_the_backbone() -> None:
    job = with_module(1, memory(100))
    check(job, (98, []), (90, [24]))
    assert refused(job, (98, []), (100, []), (91, [24])) == (
        f"{WHERE}, row 20: it has 102 tokens, but the memory of a rank of module llm holds 100 (2 too large in this "
        "shard); raise memory.budget_bytes of the module, lower stream.seq_len, or leave such samples out with a "
        "filter or a quarantine list"
    )
    check(with_module(1, memory(100), stream={"seq_len": 100}), (1000, []))  # its text is cut


def test_the_longer_task_counts() -> None:
    job = with_module(1, memory(100), stream={"generation": {"ratio": "0.5", "query_tokens": 64}})
    check(job, (34, [4]))
    assert "row 10: it has 101 tokens" in refused(job, (35, [4]))  # 35 of text, BOS, BOI, 64 queries
    always = with_module(1, memory(100), stream={"generation": {"ratio": "1", "query_tokens": 8}})
    check(always, (5, [400]))  # a target takes no tokens


def test_a_sample_may_take_the_largest_group_of_ranks() -> None:
    exchange = [{"degree": d, "unit_ps": 1} for d in (2, 4)]
    layout = {"kind": "grouped", "max_degree": 4, "exchange": exchange}
    job = with_module(1, memory(100), dp=8, stream={"global_batch": 8}, execution={"layout": layout})
    check(job, (398, []))
    assert "row 10: it has 401 tokens, but the memory of 4 ranks of module llm holds 400" in refused(job, (399, []))
    assert "raise layout.max_degree, lower stream.seq_len, or leave" in refused(job, (399, []))


def test_the_images_of_a_sample_must_fit_one_wave() -> None:
    stream = {"seq_len": 2048}
    two = with_module(0, {"dp": 2, **memory(100)}, stream=stream)
    check(two, (5, [60, 40, 60, 40]), (5, [100, 100]))
    assert refused(two, (5, [60, 40, 60, 40]), (5, [60, 60, 60])) == (
        f"{WHERE}, row 20: its 3 images, which belong to one wave, have 180 patches, but 2 ranks of module vit with "
        "memory for 100 each cannot hold them; raise memory.budget_bytes or dp of the module, lower "
        "stream.sizing.max_patches, or leave such samples out with a filter or a quarantine list"
    )
    padded = with_module(0, {"dp": 2, "padded": True, **memory(100)}, stream=stream)
    check(padded, (5, [100, 24, 24, 24, 24]))
    assert "4 images, which belong to one wave, have 172 patches before padding, but 2 ranks" in (
        refused(padded, (5, [60, 48, 60, 4]))
    )
    beside = with_module(0, {"dp": 2, "balance": "none", **memory(100)}, stream=stream)
    check(beside, (5, [60, 40]))
    assert "have 104 patches, but 1 rank of module vit" in refused(beside, (5, [60, 44]))


def test_padded_images_of_a_sample_count_as_its_largest_one() -> None:
    """A statistics says how many images a sample has at most, not which: as many as that of the largest size fit or are
    looked at.
    """
    for units, clear in ((119, False), (120, True)):
        job = with_module(0, {"padded": True, **memory(units)}, stream={"seq_len": 2048})
        statistics = row_statistics(job.stream.sizing, columns([(5, [40, 4, 4]), (5, [40])]), np.arange(2))
        assert layout_of(job.spec.execution).limits(job.spec).add_statistics(0, statistics).tolist() == [clear]


def test_colocated_images_of_a_sample_may_be_apart() -> None:
    for balance in ("lpt", "none"):
        vit = {"name": "vit", "kind": "encoder", "balance": balance, **memory(100)}
        execution = {"modules": [vit, {"name": "llm", "kind": "backbone"}], "layout": {"kind": "colocated"}}
        job = make_job(stream={"seq_len": 2048}, execution=execution)
        check(job, (5, [100, 100]))
        assert "row 10: it has 104 patches of an image" in refused(job, (5, [104]))


def keeping(balance: str, units: int, **changes: Any) -> Job:
    """Two colocated ranks that keep so many patches each."""
    budget = {"memory": {"budget_bytes": 1000, "unit_bytes": 10, "step_bytes": 10 * units}}
    vit = {"name": "vit", "kind": "encoder", "dp": 2, "balance": balance, **budget, **changes}
    execution = {"modules": [vit, {"name": "llm", "kind": "backbone", "dp": 2}], "layout": {"kind": "colocated"}}
    return make_job(stream={"seq_len": 2048, "global_batch": 2}, execution=execution)


@pytest.mark.parametrize(("balance", "kept"), [("lpt", 300), ("none", 150)])
def test_the_images_of_a_colocated_sample_must_fit_what_its_ranks_keep(balance: str, kept: int) -> None:
    job = keeping(balance, 150)
    fits, beyond = [kept // 6 // 4 * 4] * 6, [100] * (kept // 100) + [52]
    check(job, (5, fits), (5, [100]))
    expected = f"row 20: its images have {sum(beyond)} patches, which module vit keeps until its backward phase, but"
    assert f"{expected} memory.step_bytes holds {kept} of a sample" in refused(job, (5, fits), (5, beyond))


@pytest.mark.parametrize("balance", ["lpt", "even"])
def test_the_images_of_a_colocated_sample_must_also_spread(balance: str) -> None:
    """Of three of 80 patches no rank of 150 keeps two, though two ranks hold 300; padding takes nothing more."""
    for padded in (False, True):
        job = keeping(balance, 150, padded=padded)
        check(job, (5, [100, 40]), (5, [4, 100, 40, 100]))
        assert "of a sample" in (message := refused(job, (5, [80, 80]), (5, [80, 80, 80])))
        assert f"({balance} balance, 2 ranks), and no way was found to spread them; raise" in message


def contrastive(**changes: dict[str, Any]) -> Job:
    towers = [{"name": m, "kind": "tower", "modality": m, **changes.get(m, {})} for m in ("image", "text")]
    return make_job(
        stream={"global_batch": 4, "contrastive_batch": 4, "packing": {"enabled": False}},
        execution={"modules": towers, "layout": {"kind": "contrastive"}},
    )


def test_contrastive_samples_are_pairs() -> None:
    job = contrastive()
    check(job, (5, [16]))
    for images, text in (([], 5), ([16], 0), ([16, 16], 5)):
        assert refused(job, (5, [16]), (text, images)) == (
            f"{WHERE}, row 20: the sample has {len(images)} image{'' if len(images) == 1 else 's'} and {text} text "
            "tokens; for contrastive training it needs one image and some text (1 other in this shard), leave such "
            "samples out with a filter or a quarantine list"
        )


def test_both_halves_of_a_pair_must_fit_their_towers() -> None:
    check(contrastive(image=memory(100), text=memory(50)), (9, [100]))
    assert "row 10: it has 104 patches of an image, but the memory of a rank of module image" in (
        refused(contrastive(image=memory(100)), (5, [104]))
    )
    assert "tokens, but the memory of a rank of module text holds 50" in refused(
        contrastive(text=memory(50)), (51, [4])
    )


@settings(max_examples=100)
@given(st.sampled_from(["0", "0.5", "1"]), st.integers(1, 64), st.integers(0, 2**32), st.integers(1, 3))
def test_no_sample_is_longer_than_foreseen(ratio: str, queries: int, seed: int, max_images: int) -> None:
    """And every pair reaches what was foreseen in one of its tasks."""
    generation = {"ratio": ratio, "query_tokens": queries}
    job = make_job(stream={"seq_len": 900, "sizing": {"max_patches": 256}, "generation": generation}, generator=1)
    shard = make_table(job, np.random.default_rng(seed), 12, max_images)
    drawn = [size_samples(job.stream, 0, epoch, shard.row.astype(np.uint64), shard) for epoch in range(40)]
    longest = np.max([samples.tokens for samples in drawn], axis=0)
    assert np.array_equal(longest, most_tokens(job.stream, shard))
    assert {Task(t) for samples in drawn for t in samples.task} <= {Task.UNDERSTANDING, Task.GENERATION}


def test_too_large_is_an_error_of_its_own() -> None:
    with pytest.raises(SampleTooLargeError):
        check(with_module(1, memory(10)), (9, []))
