"""Clips, videos, tiles and generated documents: what the solver counts is what servers plan."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from dataserver.planning.job.fields import Modality, ModelSize, Sizing
from dataserver.planning.job.fields import Stream as JobStream
from dataserver.planning.job.identity import parse_job
from dataserver.planning.planner import plan_step
from dataserver.planning.stream.item_sizes import item_grids, item_marks, item_tokens
from dataserver.planning.stream.samples import AUDIO, IMAGE, VIDEO, SampleSizes, StepSamples, Task
from trainclient.layouts.contrastive.degrees import contrastive
from trainclient.layouts.pipelined.degrees import pipelined
from trainclient.orchestrate.choice import Problem
from trainclient.orchestrate.cluster import cluster
from trainclient.orchestrate.command import Orchestrate, OrchestrateError, problem
from trainclient.orchestrate.job_execution import execution_block
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.rescoring import drawn_samples, simulate, stream_block
from trainclient.orchestrate.sample_sizes import SampleSize, WorkloadError, read_sizes
from trainclient.orchestrate.workload import Stream, workload

SIZE = ModelSize(2, 64, 256, 4, 4)
BACKBONE = Network("backbone", "backbone", ModelSize(4, 64, 192, 4, 2, 262), input_gradient=True)
EYES = Network("encoder", "encoder", SIZE)
EARS = Network("audio-encoder", "encoder", SIZE, modality="audio")
FILMS = Network("video-encoder", "encoder", SIZE, modality="video")
PAINTER = Network("generator", "generator", SIZE, 64, input_gradient=True)
MEDIA = SampleSize(3, 10, (16, 750, 96), modality=(Modality.IMAGE, Modality.AUDIO, Modality.VIDEO), groups=(1, 1, 6))


def drawn(found: Problem) -> tuple[JobStream, StepSamples]:
    """The stream of a simulated job, and the samples of its first step."""
    block = execution_block(found, pipelined(found)[0])
    job = parse_job({"stream": stream_block(found), "execution": block})
    samples = drawn_samples(found.workload, job.spec.stream, 0)
    plan_step(job, 0, samples)
    return job.spec.stream, samples


def test_each_encoder_has_its_items() -> None:
    """A clip of 750 positions is 375 tokens, a video of six frames of 16 patches 24; frames do not see each other."""
    found = workload([MEDIA, SampleSize(1, 10, ())], Stream(8, 1024, packed=False))
    loads = {network.name: found.load(network) for network in (EYES, EARS, FILMS)}
    assert {name: (of.items, of.rows, of.tokens, of.largest) for name, of in loads.items()} == {
        "encoder": (0.75, 12, 3, 16), "audio-encoder": (0.75, 562.5, 281.25, 750), "video-encoder": (0.75, 72, 18, 96)
    }  # fmt: skip
    assert [of.squares for of in loads.values()] == [0.75 * 16**2, 0.75 * 750**2, 0.75 * 6 * 16**2]
    assert found.load(BACKBONE).largest == 2 + (4 + 2) + (375 + 2) + (24 + 2) + 10


def test_steps_of_three_encoders_are_planned_and_simulated() -> None:
    devices = cluster("h100", 8, 8)
    found = Problem((EYES, EARS, FILMS, BACKBONE), devices, workload([MEDIA], Stream(16, 1024)), max_tp=1)
    stream, samples = drawn(found)
    modality = samples.image_modality
    assert {n: int((modality == n).sum()) for n in (IMAGE, AUDIO, VIDEO)} == dict.fromkeys((0, 1, 2), len(samples))
    assert (item_tokens(samples, stream.sizing).reshape(-1, 3) == [4, 375, 24]).all()
    choice = pipelined(found)[0]
    assert {m.option.network.name for m in choice.modules} == {"encoder", "audio-encoder", "video-encoder", "backbone"}
    block = execution_block(found, choice)
    assert [m.get("modality") for m in block["modules"]] == [None, "audio", "video", None]
    assert yaml.safe_load(yaml.safe_dump(block)) == block, "it can be printed"
    assert simulate(found, choice, block, [0]).mean_ns > 0


ONEVISION = {
    "patch": 14, "merge": 1, "rule": "tiles", "side": 28, "resampling": "bicubic",
    "tiles": {"choice": "pinpoints", "grids": [[1, 2], [2, 1], [2, 2], [4, 4]], "max_tiles": 2},
}  # fmt: skip


def test_tiles_are_simulated_with_the_tokens_that_servers_plan() -> None:
    """LLaVA-OneVision: many tiles have fewer tokens than patches, and an end of each row."""
    sizing = Sizing.model_validate(ONEVISION)
    widths, heights = np.array([30, 200, 60, 111], np.int32), np.array([30, 190, 20, 112], np.int32)
    offsets = np.arange(5)
    rows, columns, media = item_grids(offsets, widths, heights, None, sizing)
    sized = SampleSizes(np.full(4, 7), offsets, rows, columns, **media)
    tokens, patches = item_tokens(sized, sizing) + item_marks(sized, sizing), rows * columns
    assert (tokens < patches).any()
    sizes = [
        SampleSize(1, 7, (int(n),), (int(of),), layouts=(tuple(layout),))
        for n, of, layout in zip(patches, tokens, media["image_layout"].tolist(), strict=True)
    ]
    devices, stream = cluster("h100", 2, 2), Stream(8, 512, 1, packed=False, sizing=sizing)
    found = Problem((EYES, BACKBONE), devices, workload(sizes, stream), max_tp=1)
    _, samples = drawn(found)
    expected = dict(zip(patches.tolist(), tokens.tolist(), strict=True))
    assert samples.tokens.tolist() == [2 + 2 + 7 + expected[n] for n in samples.patches.tolist()]
    assert set(samples.patches.tolist()) == set(expected)


TOLD = {"video": {"rule": "qwen3", "timestamps": {"digits": [*range(48, 58)], "point": [46], "after": [62]}}}
"""Sizing of videos whose frames have their times before them."""


def test_videos_with_timestamps_are_simulated_with_the_tokens_that_servers_plan() -> None:
    """Six groups of 16 patches, and 30 tokens of their times."""
    sizing = Sizing.model_validate(TOLD)
    told = SampleSize(1, 10, (16, 96), (4, 24 + 30), (Modality.IMAGE, Modality.VIDEO), (1, 6))
    sizes, stream = [told, SampleSize(1, 10, (16,))], Stream(8, 512, packed=False, sizing=sizing)
    found = Problem((EYES, FILMS, BACKBONE), cluster("h100", 4, 4), workload(sizes, stream), max_tp=1)
    assert found.workload.load(BACKBONE).largest == 2 + (4 + 2) + (54 + 2) + 10
    planned, samples = drawn(found)
    assert set(samples.tokens.tolist()) == {2 + (4 + 2) + (54 + 2) + 10, 2 + (4 + 2) + 10}
    assert set(item_marks(samples, planned.sizing)[samples.image_modality == VIDEO].tolist()) == {30}


def test_towers_are_simulated_without_the_times_of_frames() -> None:
    """Sizes that were made with timestamps may be given for towers too, whose jobs must not state any."""
    towers = (Network("image", "tower", SIZE, modality="image"), Network("text", "tower", SIZE, modality="text"))
    sizing = Sizing.model_validate(TOLD)
    stream = Stream(8, 64, packed=False, contrastive_batch=8, sizing=sizing)
    sizes = workload([SampleSize(1, 10, (16,))], stream)
    found = Problem(towers, cluster("h100", 2, 2), sizes, max_tp=1)
    choice = contrastive(found)[0]
    job = parse_job({"stream": stream_block(found), "execution": execution_block(found, choice)})
    assert job.stream.sizing.video is not None
    assert job.stream.sizing.video.timestamps is None
    assert simulate(found, choice, execution_block(found, choice), [0]).mean_ns > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "`image_tokens` of each item are required where `sizing` has timestamps"),
        ({"image_tokens": [4, 23]}, "`image_tokens` has 23 for a video of 96 patches, which has 24 embeddings"),
        ({"image_tokens": [3, 24]}, None),
    ],
)
def test_videos_are_refused_without_the_tokens_of_their_timestamps(
    tmp_path: Path, change: dict[str, list[int]], said: str | None
) -> None:
    file = tmp_path / "sizes.json"
    sample = {"text_tokens": 10, "patches": [16, 96], "modality": ["image", "video"], "groups": [1, 6], **change}
    file.write_text(json.dumps({"sizing": TOLD, "samples": [sample, {"text_tokens": 10, "patches": [16]}]}))
    if said is None:
        assert read_sizes(file).samples[0].image_tokens == (3, 24)
        return
    with pytest.raises(WorkloadError, match=said):
        read_sizes(file)


def test_documents_are_generated_as_servers_draw_them() -> None:
    """Any image with text before it is the target, and what is read is what stands before that."""
    size = SampleSize(1, 60, (16, 64, 16), image_texts=(0, 20, 40))
    stream = Stream(64, 1024, generation=0.5, query_tokens=4, packed=False, interleaved=True)
    found = workload([size], stream)
    understood, first, last = 2 + 60 + 6 + 18 + 6, 2 + 4 + 20 + 6, 2 + 4 + 40 + 6 + 18
    assert found.load(BACKBONE).rows == 0.5 * understood + 0.25 * first + 0.25 * last
    assert found.load(EYES).rows == 0.5 * 96 + 0.25 * 16 + 0.25 * 80
    assert found.load(PAINTER).rows == 0.25 * 64 + 0.25 * 16
    made = Problem((EYES, BACKBONE, PAINTER), cluster("h100", 4, 4), found, max_tp=1)
    _, samples = drawn(made)
    assert set(samples.tokens.tolist()) == {understood, first, last}
    generated = samples.task == Task.GENERATION
    assert set(samples.tokens[generated].tolist()) == {first, last}
    assert 16 < generated.sum() < 48


def test_the_command_takes_encoders_of_clips_and_videos(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    sample = {"text_tokens": 10, "patches": [16, 750, 96], "modality": ["image", "audio", "video"], "groups": [1, 1, 6]}
    file.write_text(json.dumps({"sizing": {"audio": {"merge": 1}}, "samples": [sample]}))
    options = Orchestrate(
        encoder="tiny", audio_encoder="tiny", video_encoder="tiny", backbone="tiny", sizes=file,
        frozen=("audio-encoder",), gpus=8, seq_len=2048,
    )  # fmt: skip
    found = problem(options)
    assert [(n.name, n.modality, n.frozen, n.gradient_passes) for n in found.networks] == [
        ("encoder", None, False, 2), ("audio-encoder", "audio", True, 0), ("video-encoder", "video", False, 2),
        ("backbone", None, False, 2),
    ]  # fmt: skip
    assert found.workload.load(found.networks[1]).tokens == found.workload.load(found.networks[1]).rows
    for change, said in (
        ({"audio_encoder": None, "frozen": ()}, "the samples have clips to encode, and no --audio-encoder is given"),
        ({"video_encoder": None}, "the samples have videos to encode, and no --video-encoder is given"),
        ({"interleaved": True}, "--generation is 0: nothing is generated"),
        ({"merge": 4}, "was made with merge 2; leave --merge out"),
    ):
        with pytest.raises(OrchestrateError, match=said):
            problem(options.model_copy(update=change))
    file.write_text(json.dumps({"samples": [{"text_tokens": 10, "patches": [16]}]}))
    with pytest.raises(OrchestrateError, match="--audio-encoder has nothing to do"):
        problem(options)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"modality": ["image", "sound", "video"]}, "have an entry for each of the patches"),
        ({"groups": [1, 1]}, "have an entry for each of the patches"),
        ({"groups": [1, 1, 0]}, "have an entry for each of the patches"),
        ({"groups": [1, 1, 7]}, "a multiple of them"),
        ({"layouts": [[1, 1, 0, 0, 0, 0]] * 3}, "`layouts` of each item are required where `sizing` has tiles"),
    ],
)
def test_what_items_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "sizes.json"
    sample = {"text_tokens": 10, "patches": [16, 750, 96], "modality": ["image", "audio", "video"], "groups": [1, 1, 6]}
    file.write_text(json.dumps({"samples": [sample | change]}))
    with pytest.raises(WorkloadError, match=said):
        read_sizes(file)


def test_sizes_of_tiles_that_do_not_say_how_images_are_cut_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps({"tile_patches": 1024, "samples": [{"text_tokens": 10, "patches": [2048]}]}))
    with pytest.raises(WorkloadError, match=r"has `tile_patches` and no `sizing`.*sizes --job` write the file again"):
        read_sizes(file)
