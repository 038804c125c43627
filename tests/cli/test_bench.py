"""`dataserver bench` on small datasets: what it makes and counts. How fast that is, is the machine's affair."""

import json
import re
from itertools import repeat
from pathlib import Path

import pytest
from audio.datasets import write_audio
from cli.server_process import refused, run
from serving.harness import index
from shards import break_images, write_interleaved, write_pairs, write_texts
from video.datasets import write_videos
from video.heard import write_heard

from dataserver.cli.bench import RATES, bench, cores_for, limiting_stage
from dataserver.cli.throughput import OTHER, Decoded, Made, Maker, images_of, sampled
from dataserver.dataset import Dataset, usable_cores
from dataserver.planning.job.fields import AudioSizing, Sizing, clip_frames, clip_positions
from dataserver.planning.stream.grids import patch_grid
from dataserver.planning.stream.samples import AUDIO

SIZING = Sizing(max_patches=64)
TILED = Sizing.model_validate(
    {
        "rule": "tiles",
        "patch": 8,
        "merge": 2,
        "side": 32,
        "resampling": "bicubic",
        "tiles": {"choice": "aspect", "min_tiles": 1, "max_tiles": 4},
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 pairs in three shards, in turns JPEG, PNG and WebP; the first is broken."""
    root = tmp_path_factory.mktemp("bench")
    found = index(write_pairs(root / "d", 40, 16, seed=4, formats=("JPEG", "PNG", "WEBP")))
    break_images(found, (0, 0))
    return found


def maker(dataset: Dataset) -> Maker:
    return Maker(dataset, SIZING)


def test_samples_are_spread_evenly_over_the_shards(folder: Path) -> None:
    dataset = Dataset.open(folder)
    rows = [(shard, row) for shard in dataset.shards for row in range(shard.num_samples)]
    order = [shard.image(row, 0) for shard, row in rows]
    places = [order.index(sample.images[0][0]) for sample in sampled(dataset, 10, SIZING)]
    assert places == [0, 4, 8, 12, 16, 20, 24, 28, 32, 36]
    assert len(sampled(dataset, 1000, SIZING)) == 40


def test_every_image_is_made_once_and_counted_by_its_format(folder: Path) -> None:
    dataset = Dataset.open(folder)
    chosen = sampled(dataset, 40, SIZING)
    made = maker(dataset).make(chosen)
    counts = {name: (decoded.images, decoded.invalid) for name, decoded in made.by_format.items()}
    assert counts == {"jpeg": (14, 1), "png": (13, 0), "webp": (13, 0)}
    refs = [ref for sample in chosen for ref, _ in sample.images]
    assert sum(decoded.num_bytes for decoded in made.by_format.values()) == sum(ref.length for ref in refs)
    assert sum(decoded.pixels for decoded in made.by_format.values()) == sum(ref.width * ref.height for ref in refs)
    assert made.num_images == 40
    assert made.seconds == sum(made.stages_s.values())
    assert min(made.stages_s.values()) > 0


def test_shapes_are_those_of_the_planner(folder: Path) -> None:
    for sample in sampled(Dataset.open(folder), 40, SIZING):
        for ref, shape in sample.images:
            assert (shape.rows, shape.columns) == patch_grid(ref.width, ref.height, SIZING)


def test_documents_have_all_their_images(tmp_path: Path) -> None:
    dataset = Dataset.open(index(write_interleaved(tmp_path / "d", 12, 4, seed=2)))
    chosen = sampled(dataset, 12, SIZING)
    sizes = [shard.sizes() for shard in dataset.shards]
    assert sum(len(sample.images) for sample in chosen) == sum(len(size.image_width) for size in sizes)


def test_threads_make_the_same_images(folder: Path) -> None:
    dataset = Dataset.open(folder)
    found = maker(dataset).rate(sampled(dataset, 40, SIZING), 3)
    assert found.threads == 3
    assert found.images > 0
    assert found.cores > 0


def test_what_is_printed(folder: Path) -> None:
    done = run("bench", folder, "--samples", "20", "--max-patches", "64", "--threads", "2")
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    cores = usable_cores()
    assert (
        f"20 of 40 samples, spread evenly over 3 shards, with 20 images; measured on this machine, {cores} core"
        in shown
    )
    images = {name: int(count) for name, count in re.findall(r"^  (jpeg|png|webp) +(\d+) ", shown, re.MULTILINE)}
    assert sum(images.values()) == 20
    assert re.findall(r"^  (reading|decoding) ", shown, re.MULTILINE) == ["reading", "decoding"]
    assert len(re.findall(r" limits *$", shown, re.MULTILINE)) == 1
    assert len(re.findall(r"^  [12] +\d+ ", shown, re.MULTILINE)) == 2
    assert [int(n.replace(",", "")) for n in re.findall(r"for ([\d,]+) images/s you need", shown)] == list(RATES)


def test_the_cores_of_a_rate_are_those_that_the_printed_rate_needs(folder: Path) -> None:
    done = run("bench", folder, "--samples", "8", "--rate", "1000000", "--quality", "exact", "--threads", "1")
    needed = re.search(r"^for 1,000,000 images/s you need ([\d,]+) cores", done.stdout, re.MULTILINE)
    of_core = re.search(r"counted with (\d+) images/s of a busy core", done.stdout)
    assert needed, done
    assert of_core
    assert int(needed[1].replace(",", "")) == pytest.approx(1_000_000 / int(of_core[1]), rel=0.05)


def test_cores_are_whole_and_enough() -> None:
    assert [cores_for(images, 100.0) for images in (1, 100, 101, 1000)] == [1, 1, 2, 10]


def test_the_stage_that_took_most_limits() -> None:
    slow_storage = Made(reading_s=3.0, by_format={"png": Decoded(seconds=2.0)})
    assert limiting_stage(slow_storage) == "reading"
    slow_storage.by_format["jpeg"] = Decoded(seconds=2.0)
    assert limiting_stage(slow_storage) == "decoding"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--samples", "0"), "--samples is 0; 1 to 100000 is required"),
        (("--rate", "-5"), "--rate is -5; 1 to"),
        (("--threads", "0"), "--threads is 0"),
        (("--max-patches", "0"), "dataserver: max_patches: found 0; it should be greater than or equal to 1"),
        (("--max-patches", "1"), "max_patches is 1"),
    ],
)
def test_refusals(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("bench", folder, *arguments)


def test_datasets_that_it_cannot_measure_are_named(tmp_path: Path) -> None:
    assert "has an image, a clip or a video; bench measures" in refused(
        "bench", index(write_texts(tmp_path / "t", 8, 8))
    )
    unindexed = write_pairs(tmp_path / "d", 4, 4)
    assert f"run: dataserver index {unindexed}" in refused("bench", unindexed)
    assert "cannot be opened" in refused("bench", tmp_path / "none")


def test_images_are_cut_into_tiles_as_a_job_says(folder: Path) -> None:
    dataset = Dataset.open(folder)
    chosen = sampled(dataset, 40, TILED)
    shapes = [shape for sample in chosen for _, shape in sample.images]
    assert {shape.columns for shape in shapes} == {4}
    assert all(shape.rows == 4 * (n + (n > 1)) for shape in shapes if (n := shape.tiles[0] * shape.tiles[1]))
    made = Maker(dataset, TILED).make(chosen)
    assert sum(decoded.invalid for decoded in made.by_format.values()) == 1


def test_clips_are_made_and_counted_beside_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    folder = write_audio(tmp_path / "d", 1, 10)
    dataset = Dataset.open(folder)
    sizes = dataset.shards[0].sizes()
    chosen = sampled(dataset, 10, SIZING)
    made = Maker(dataset, SIZING).make(chosen)
    is_clip = sizes.image_modality == AUDIO
    assert made.num_images == len(is_clip)
    assert {name for name, decoded in made.by_format.items() if decoded.lasting_s} == {"wav", "flac", "mp3"}
    assert made.by_format["jpeg"].images == (~is_clip).sum() == sum(len(one.images) for one in images_of(chosen))
    assert made.lasting_s == pytest.approx((sizes.image_width / sizes.image_height)[is_clip].sum())
    assert not any(decoded.invalid for decoded in made.by_format.values())
    positions = [item.columns for one in chosen for ref, item in one.images if ref.is_audio]
    frames = map(
        clip_frames, sizes.image_width[is_clip].tolist(), sizes.image_height[is_clip].tolist(), repeat(AudioSizing())
    )
    assert positions == [*map(clip_positions, frames)]
    bench(folder, samples=10, threads=1, rate=7)
    shown = capsys.readouterr().out
    assert f"with {made.num_images} items; measured on this machine" in shown
    assert re.search(r"^  jpeg +\d+ +0 +\d\.\d\d +- ", shown, re.MULTILINE)
    assert re.search(r"^  flac +\d+ +0 +- +\d\.\d\d ", shown, re.MULTILINE)
    assert "for 7 items/s you need 1 core like these" in shown


def test_videos_are_made_with_their_frames(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    dataset = Dataset.open(write_videos(tmp_path / "d", 1, 4))
    sizing = Sizing.model_validate(
        {"max_patches": 64, "video": {"max_frames": 4, "min_pixels": 784, "max_pixels": 3136}}
    )
    chosen = sampled(dataset, 4, sizing)
    videos = [(ref, item) for one in chosen for ref, item in one.images if not ref.is_image]
    assert {item.depth for _, item in videos} <= {1, 2}
    assert all(item.rows * item.columns <= item.depth * 16 for _, item in videos)
    made = Maker(dataset, sizing).make(chosen)
    assert not any(decoded.invalid for decoded in made.by_format.values())
    assert made.lasting_s == pytest.approx(sum(ref.microseconds for ref, _ in videos) / 1e6)


def test_the_sound_of_videos_is_counted_with_their_format(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    dataset = Dataset.open(write_heard(tmp_path, 4))
    sizing = Sizing.model_validate({"max_patches": 64, "audio": {}, "video": {"min_pixels": 784, "max_pixels": 3136}})
    made = Maker(dataset, sizing).make(sampled(dataset, 4, sizing))
    assert OTHER not in made.by_format


def test_what_the_transforms_of_a_job_cost_is_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    augment = {"kind": "rand_augment", "num_ops": 4, "magnitude": 20, "interpolation": "bilinear"}
    stream = {"sizing": {"max_patches": 64}, "transforms": [augment] * 8}
    (tmp_path / "job.yaml").write_text(json.dumps({"stream": stream}))
    bench(folder, samples=12, threads=1, rate=7, job=tmp_path / "job.yaml")
    shown = " ".join(capsys.readouterr().out.split())
    figures = re.search(r"CPU time of an image: ([\d.]+) ms without the transforms, ([\d.]+) ms with them$", shown)
    assert figures is not None, shown
    assert float(figures[1]) < float(figures[2])
    stream["transforms"] = [{**augment, "num_ops": 9}]
    (tmp_path / "job.yaml").write_text(json.dumps({"stream": stream}))
    message = "job.yaml: transforms.0.num_ops: found 9; it should be less than or equal to 4"
    assert message in refused("bench", folder, "--job", tmp_path / "job.yaml")
