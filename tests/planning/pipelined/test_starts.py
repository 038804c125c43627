"""What a search of placements is told of the microbatches in flight."""

import numpy as np
import pytest
from builders.jobs import job_data
from builders.samples import make_samples

from dataserver.planning.identity import parse_job
from dataserver.planning.pipelined.packed import PackedStep
from dataserver.planning.pipelined.starts import _guide


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
