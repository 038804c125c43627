"""What a search of placements is told of the microbatches in flight."""

import numpy as np
import pytest
from builders.jobs import job_data
from builders.samples import make_samples, texts

from dataserver.planning.job.identity import parse_job
from dataserver.planning.layouts.pipelined.packed import PackedStep
from dataserver.planning.layouts.pipelined.placing import placement_problem
from dataserver.planning.layouts.pipelined.starts import _guide


@pytest.mark.parametrize(
    ("layout", "extra", "expected"),
    [
        ({"schedule": "1f1b"}, 0, [4, 3, 2, 1]),
        ({"schedule": "1f1b"}, 2, [6, 5, 4, 1]),
        ({"schedule": "gpipe"}, 0, [8, 8, 8, 8]),
        ({"schedule": "interleaved", "chunks": 2}, 0, [4, 3, 2, 1]),
    ],
    ids=str,
)
def test_the_search_holds_what_the_schedule_holds(layout: dict[str, object], extra: int, expected: list[int]) -> None:
    """Of an encoder, two backbone stages and a generator; an interleaved search knows no chunks."""
    data = job_data(encoder=1, backbone=(1, 2), generator=1, stream={"global_batch": 8, "packing": {"enabled": False}})
    data["execution"]["layout"] = {"kind": "pipelined", **layout}
    job = parse_job(data)
    packed = PackedStep(job, 3, make_samples(job, 8), np.arange(8), 8)
    assert _guide(packed, extra, {}).tolist() == expected


def test_times_of_a_stage_are_those_of_all_its_chunks() -> None:
    """Two stages of three chunks run a sixth of the backbone each time, in whole nanoseconds."""
    data = job_data(encoder=0, backbone=(1, 2), stream={"global_batch": 4})
    data["execution"]["layout"] = {"kind": "pipelined", "schedule": "interleaved", "chunks": 3}
    data["execution"]["modules"][0]["cost"] = {"microbatch_ns": 65, "linear_ps": 1_000, "quadratic_fs": 0}
    found = placement_problem(parse_job(data).spec, np.array([6, 6]), texts(np.array([12, 100, 65])), np.arange(3), 3)
    assert found.own.tolist() == [[2 * 3, 16 * 3, 10 * 3, 0]]
    assert found.base.tolist() == [10 * 3]
    assert found.chunks == 3
