"""What a grouped job may say: defaults, limits on both sides, and the largest numbers that planning it can meet."""

from typing import Any

import pytest
from builders.grouped import backbone_of, grouped_data
from builders.jobs import Data

from dataserver.planning.job.fields import parse_json
from dataserver.planning.job.identity import Job, JobSpecError, parse_job
from dataserver.planning.layouts.grouped.options import GroupedOptions, GroupPolicy
from dataserver.planning.layouts.interface import layout_of

COST = {"microbatch_ns": 7_001, "linear_ps": 12_345, "quadratic_fs": 678_901, "backward_percent": 150}
STREAM = {"seq_len": 1_003, "global_batch": 16}


def options_of(job: Job) -> GroupedOptions:
    return job.spec.execution.options(GroupedOptions)


def extremes(dp: int, **groups: Any) -> list[tuple[str, int, str]]:
    """Those of the groups alone."""
    job = parse_job(grouped_data(dp, 2_000, groups, COST, stream=STREAM, encoder=0))
    return [(e.what, e.value, e.remedy) for e in options_of(job).extremes(job.stream, job.spec.execution)]


@pytest.mark.parametrize(
    ("dp", "groups", "exchange_ps", "devices"),
    [
        (8, {"max_degree": 8}, 4 * 400_000, 1_024),
        (8, {"max_degree": 1}, 0, 1_024),
        (1_024, {"min_degree": 64, "max_degree": 64}, 7 * 400_000, 1_024),
        (1_088, {"min_degree": 64, "max_degree": 64}, 7 * 400_000, 1_088),
    ],
)
def test_the_largest_numbers(dp: int, groups: dict[str, int], exchange_ps: int, devices: int) -> None:
    """Twice the batch, since halves of it may be planned; every time as often as there are devices."""
    remedy = "lower the costs of the backbone or of the exchange, or stream.seq_len"
    token_ps, square_fs = 12_345 * 250 // 100 + exchange_ps, 678_901 * 250 // 100
    time = 1_003 * token_ps // 1_000 + 1_003**2 * square_fs // 10**6 + 7_001 * 250 // 100
    assert extremes(dp, **groups) == [
        ("nanoseconds of all groups x ranks", 4 * time * 32 * devices, remedy),
        ("picoseconds of exchanges", 2 * 32 * 1_003 * token_ps, remedy),
        ("femtoseconds of attention", 2 * 1_003**2 * square_fs, remedy),
    ]


def test_the_dearest_exchange_counts() -> None:
    exchange = [{"degree": 2, "unit_ps": 900_000}, {"degree": 4, "unit_ps": 5}]
    dear = extremes(4, max_degree=4, exchange=exchange)
    assert dear[1][1] == 2 * 32 * 1_003 * (12_345 * 250 // 100 + 900_000)


@pytest.mark.parametrize(("schedule", "encoder", "tried"), [("1f1b", 1, True), ("gpipe", 1, False), ("1f1b", 0, False)])
def test_more_in_flight_is_tried_where_the_schedule_bounds_it(schedule: str, encoder: int, tried: bool) -> None:
    job = parse_job(grouped_data(4, 2_000, {"max_degree": 4, "schedule": schedule}, stream=STREAM, encoder=encoder))
    names = [dimension.name for dimension in layout_of(job.spec.execution).alternatives(job).single]
    assert ("extra_in_flight" in names) == tried
    assert ("order" in names) == bool(encoder)


def test_defaults_and_sizes() -> None:
    job = parse_job(grouped_data(8, 2_000, {"max_degree": 8}, stream=STREAM, encoder=0))
    options, execution = options_of(job), job.spec.execution
    assert (options.policy, options.min_degree) == (GroupPolicy.SEARCH, 1)
    assert GroupedOptions(kind="grouped", max_degree=1).exchange == ()
    assert options.num_microbatches(job.stream, execution) == 1
    assert options.step_size(job.stream, execution)["group_sequences"] == 16


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"min_degree": 0, "max_degree": 1}, "greater than or equal to 1"),
        ({"max_degree": 0}, "greater than or equal to 1"),
        ({"min_degree": 131_072, "max_degree": 65_536}, "less than or equal to 65536"),
        ({"max_degree": 131_072}, "less than or equal to 65536"),
        ({"max_degree": 2, "exchange": [{"degree": 1, "unit_ps": 0}]}, "greater than or equal to 2"),
        ({"max_degree": 2, "exchange": [{"degree": 65_537, "unit_ps": 0}]}, "less than or equal to 65536"),
        ({"min_degree": 2, "max_degree": 1}, "min_degree is 2, above max_degree 1; lower it"),
        ({"max_degree": 5}, "max_degree is 5; a power of two is required"),
        ({"min_degree": 6, "max_degree": 8}, "min_degree is 6; a power of two is required"),
        (
            {"min_degree": 4, "max_degree": 16, "exchange": [{"degree": 16, "unit_ps": 1}]},
            r"exchange has degrees \[16\]; one entry for each of \[4, 8, 16\] is required",
        ),
        ({"max_degree": 1, "exchange": [{"degree": 2, "unit_ps": 1}]}, r"one entry for each of \[\] is required"),
        ({"max_degree": 1, "schedule": "interleaved"}, "schedule is interleaved; a grouped backbone has one stage"),
    ],
)
def test_impossible_options(groups: Data, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedOptions.model_validate({"kind": "grouped", **groups})


def test_limits_that_are_just_possible() -> None:
    most = [{"degree": 65_536, "unit_ps": 1}]
    options = GroupedOptions.model_validate(
        {"kind": "grouped", "min_degree": 65_536, "max_degree": 65_536, "exchange": most}, strict=False
    )
    assert options.exchange[0].degree == options.min_degree == options.max_degree == 65_536
    two = GroupedOptions.model_validate(
        {"kind": "grouped", "max_degree": 2, "exchange": [{"degree": 2, "unit_ps": 0}]}, strict=False
    )
    assert two.exchange[0].unit_ps == 0


def test_ways_to_group_the_ranks_are_limited() -> None:
    """256 ranks in groups of 1 to 8 have 47,905 ways, 264 ranks have 52,394; 50,000 are allowed."""
    parse_job(grouped_data(256, 2_000, {"max_degree": 8}, stream={**STREAM, "global_batch": 256}, encoder=0))
    data = grouped_data(264, 2_000, {"max_degree": 8}, stream={**STREAM, "global_batch": 264}, encoder=0)
    message = (
        "264 devices have 52394 compositions of groups of 1 to 8, and at most 50000 are searched: use min_degree 2"
    )
    with pytest.raises(JobSpecError, match=message):
        parse_job(data)


@pytest.mark.parametrize(
    ("fields", "pp", "sp", "padded"),
    [({"pp": 2}, 2, 1, False), ({"sp": 2}, 1, 2, False), ({"padded": True}, 1, 1, True)],
)
def test_backbones_that_cannot_form_groups(fields: Data, pp: int, sp: int, padded: bool) -> None:
    data = grouped_data(4, 2_000, {"max_degree": 4}, encoder=0)
    backbone_of(data).update(fields)
    message = f"module llm has pp {pp}, sp {sp}, padded {padded} and memory; groups need pp 1, sp 1, no padding, and m"
    with pytest.raises(JobSpecError, match=message):
        parse_job(data)


def test_devices_of_a_group_have_no_tensor_parallel_peers() -> None:
    data = grouped_data(4, 2_000, {"max_degree": 4}, encoder=0)
    backbone_of(data)["tp"] = 2
    with pytest.raises(JobSpecError, match=r"module llm has tp 2; .* set tp to 1 and dp to 8"):
        parse_job(data)


def test_groups_decide_microbatches() -> None:
    data = grouped_data(4, 2_000, {"max_degree": 4}, encoder=0)
    data["execution"]["microbatch"] = 2
    with pytest.raises(JobSpecError, match="microbatch is 2; groups decide microbatches themselves: leave microbatch"):
        parse_job(data)


def test_the_advice_for_ranks_that_do_not_divide() -> None:
    for dp, most, advised in ((6, 4, 2), (12, 8, 4), (7, 2, 1), (8, 16, 8)):
        message = rf"dp {dp} and groups up to {most} ranks; .* lower max_degree to {advised}(?!\d)"
        with pytest.raises(JobSpecError, match=message):
            parse_job(grouped_data(dp, 2_000, {"max_degree": most}, encoder=0))


@pytest.mark.parametrize(
    ("most", "heads", "model", "message"),
    [
        (4, 2, None, r"layout\.heads is 2, and groups have up to 4 ranks, .* lower layout\.max_degree to 2$"),
        (4, 6, None, r"layout\.heads is 6, .* to 2$"),
        (4, 2, "llama3-7b", r"layout\.heads is 2, "),
        (16, None, "llama3-70b", r"of module llm names llama3-70b, whose heads .* are 8, .* up to 16 .* to 8, or give"),
        (4, 0, None, "greater than or equal to 1"),
        (4, 4, None, None),
        (16, 32, "llama3-70b", None),
        (8, None, "llama3-70b", None),
        (16, None, None, None),
    ],
)
def test_heads_that_do_not_divide(most: int, heads: int | None, model: str | None, message: str | None) -> None:
    """Those that the job gives, or else those of the model that the cost names; not those of the default cost."""
    groups = {"max_degree": most} | ({} if heads is None else {"heads": heads})
    data = grouped_data(16, 2_000, groups, encoder=1)
    if model is not None:
        backbone_of(data)["cost"] = {"model": model, "device": "h100", "efficiency": "0.4"}
    if message is not None:
        with pytest.raises(JobSpecError, match=message):
            parse_job(data)
        return
    job = parse_job(data)
    assert parse_job(parse_json(job.text)).job_id == job.job_id
    assert options_of(job).heads == heads
    assert ("heads" in job.text) == (heads is not None)
