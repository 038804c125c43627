"""What a sequence holds, by hand and beside what the planner makes of drawn samples."""

import numpy as np
import pytest
from orchestration.instances import paper_problem

from dataserver.planning.job.identity import parse_job
from trainclient.layouts.pipelined.degrees import pipelined
from trainclient.orchestrate.job_execution import execution_block
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.rescoring import drawn_samples, stream_block
from trainclient.orchestrate.sample_sizes import SampleSize, WorkloadError
from trainclient.orchestrate.workload import Stream, workload

SIZE = paper_problem("llama3-7b", 8, 8, 512).networks[1].size
ENCODER, BACKBONE, GENERATOR = (Network(kind, kind, SIZE) for kind in ("encoder", "backbone", "generator"))


def test_loads_of_unpacked_samples_by_hand() -> None:
    sizes = [SampleSize(3, 10, (16,)), SampleSize(1, 0, (16, 64))]
    found = workload(sizes, Stream(8, 1024, packed=False, generation=0.5, query_tokens=4))
    pair = [2 + (4 + 2) + 10, 2 + 4 + 10]  # understood, generated
    document = 2 + (4 + 2) + (16 + 2)
    load = found.load(BACKBONE)
    assert load.items == 1
    assert load.rows == (3 * sum(pair) / 2 + document) / 4
    assert load.squares == (3 * sum(n * n for n in pair) / 2 + document**2) / 4
    assert load.largest == document
    load = found.load(ENCODER)
    assert (load.items, load.rows, load.largest) == ((1.5 + 2) / 4, (1.5 * 16 + 80) / 4, 64)
    assert load.squares == (1.5 * 16**2 + 16**2 + 64**2) / 4
    load = found.load(GENERATOR)
    assert (load.items, load.rows, load.squares, load.largest) == (1.5 / 4, 6, 1.5 * 256 / 4, 16)
    assert found.lengths.T.tolist() == [[0.375, 16, 256], [0.375, 18, 324], [0.25, 26, 676]]


def test_packed_sequences_are_filled() -> None:
    found = workload([SampleSize(1, 98, ())], Stream(8, 1000, fill=0.9))
    assert found.samples_per_sequence == 9
    assert found.load(BACKBONE).rows == 900
    assert found.load(BACKBONE).squares == 9 * 100**2


def test_drawn_samples_hold_what_the_solver_counts_with() -> None:
    problem = paper_problem("llama3-7b", 32, 256, 512)
    block = execution_block(problem, pipelined(problem)[0])
    job = parse_job({"stream": stream_block(problem), "execution": block})
    samples = drawn_samples(problem.workload, job.spec.stream, 0)
    load = problem.workload.load(problem.networks[1])
    assert samples.tokens.sum() == pytest.approx(256 * load.rows, rel=0.02)
    assert (samples.tokens**2).sum() == pytest.approx(256 * load.squares, rel=0.05)
    images = sum(problem.workload.load(n).items for n in problem.networks if n.kind != "backbone")
    assert len(samples.patches) == pytest.approx(256 * images, rel=0.02)
    again = drawn_samples(problem.workload, job.spec.stream, 0)
    assert np.array_equal(samples.task, again.task)


def test_samples_that_fit_no_tower_are_refused() -> None:
    with pytest.raises(WorkloadError, match="towers need one image and some text"):
        workload([SampleSize(1, 5, (16, 16))], Stream(8, 77, packed=False, contrastive_batch=8))


@pytest.mark.parametrize(
    ("patches", "said"),
    [
        ((616,), "a sample has an image of 616 patches, which take 158 tokens with the marks"),
        ((616, 616), "a sample has 2 images of 616 patches, which take 314 tokens with the marks"),
        ((64, 616), "a sample has 2 images of 64 to 616 patches, which take 176 tokens with the marks"),
        ((618,), r"a sample has an image of 618 patches; multiples of merge\^2 = 4 are required"),
    ],
)
def test_images_that_fit_no_sequence_are_told_as_people_would(patches: tuple[int, ...], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        workload([SampleSize(1, 5, patches)], Stream(8, 100))
