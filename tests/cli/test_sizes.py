"""`dataserver sizes`: the index in, what `trainclient orchestrate` reads out."""

import json
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from audio.datasets import write_audio
from cli.server_process import command, refused, run
from faults.disk import fill, missing, small_disk
from serving.harness import index, job_data
from shards import make_image, write_interleaved, write_pairs, write_tar
from video.datasets import write_videos

from dataserver.assembly import load_tokenizer
from dataserver.cli.sizes import LengthFlags
from dataserver.dataset import Dataset
from dataserver.dataset.quarantine import Quarantine
from dataserver.jobs import Catalog, Rules, fill_job
from dataserver.jobs.cache import JobCache
from dataserver.jobs.histogram import Size, _leading, size_histogram, thinned
from dataserver.jobs.tables import ShardTables
from dataserver.outputs import OutputError
from dataserver.planning.job.fields import Modality, ModelSize, Sizing, clip_frames, clip_positions
from dataserver.planning.job.identity import parse_job
from dataserver.planning.stream.documents import Split
from dataserver.planning.stream.grids import patch_grid
from dataserver.planning.stream.samples import AUDIO, VIDEO
from trainclient.orchestrate.networks import Network
from trainclient.orchestrate.sample_sizes import read_sizes
from trainclient.orchestrate.workload import Stream, workload


@pytest.mark.parametrize("of_rule", [{"max_patches": 64}, {"rule": "qwen", "min_pixels": 4096, "max_pixels": 16384}])
def test_every_sample_is_counted_with_its_size(of_rule: dict[str, int | str], tmp_path: Path) -> None:
    folder, file = write_pairs(tmp_path / "d", 30, 8), tmp_path / "sizes.json"
    assert run("index", folder).returncode == 0
    flags = [part for name, value in of_rule.items() for part in (f"--{name.replace('_', '-')}", value)]
    done = run("sizes", folder, "--output", file, "--patch", 16, *flags)
    assert done.returncode == 0, done.stderr
    sizing, wanted = Sizing.model_validate({"patch": 16, "merge": 2, **of_rule}), Counter[tuple[int, int]]()
    digest = load_tokenizer("bytes").digest
    for shard in Dataset.open(folder).shards:
        sizes, tokens = shard.sizes(), shard.tokens.counts(digest)
        for row in range(len(sizes.text_offsets) - 1):
            rows, columns = patch_grid(int(sizes.image_width[row]), int(sizes.image_height[row]), sizing)
            wanted[_leading(int(tokens[row])), rows * columns] += 1
    found = Counter({(s["text_tokens"], *s["patches"]): s["count"] for s in json.loads(file.read_text())["samples"]})
    assert found == wanted
    assert sum(found.values()) == 30
    assert workload(read_sizes(file).samples, Stream(8, 2048)).samples_per_sequence > 1


TILED = {
    "patch": 8, "merge": 2, "rule": "tiles", "side": 32, "resampling": "bicubic",
    "tiles": {"choice": "aspect", "min_tiles": 1, "max_tiles": 4},
}  # fmt: skip


def test_tiles_of_a_job_are_counted(tmp_path: Path) -> None:
    """Patches of all parts, their tokens, and the patches of a tile, which attend to each other alone."""
    folder, file, job = write_pairs(tmp_path / "d", 12, 6), tmp_path / "sizes.json", tmp_path / "job.json"
    index(folder)
    job.write_text(json.dumps({"stream": {"sizing": TILED}}))
    done = run("sizes", folder, "--output", file, "--job", job)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert Sizing.model_validate_json(json.dumps(found["sizing"])) == Sizing.model_validate_json(json.dumps(TILED))
    for sample in found["samples"]:
        assert sample["image_tokens"] == [patches // 4 for patches in sample["patches"]]
        assert not any(patches % 16 for patches in sample["patches"])
    assert max(p for s in found["samples"] for p in s["patches"]) > 16
    sizes = read_sizes(file)
    assert sizes.sizing is not None
    assert sizes.samples[0].layouts == tuple(map(tuple, found["samples"][0]["layouts"]))
    assert "flags for it are given as well" in refused("sizes", folder, "--output", file, "--job", job, "--patch", 8)


def test_documents_are_counted_in_parts(tmp_path: Path) -> None:
    folder, file = write_interleaved(tmp_path / "d", 12, 6), tmp_path / "sizes.json"
    index(folder)
    dataset = Dataset.open(folder)
    rules = Rules(
        load_tokenizer("bytes").digest, Sizing(max_patches=64), split=Split("items", 96, (2, None, None), True)
    )
    counted = size_histogram(dataset, rules, lambda _done, _total: None).sizes
    done = run("sizes", folder, "--output", file, "--max-patches", 64, "--seq-len", 96, "--max-images", 2)
    assert done.returncode == 0, done.stderr
    total = sum(counted.values())
    assert done.stdout.startswith(f"{total} parts of samples of {len(counted)} sizes")
    assert total > 24
    assert max(len(size.patches) for size in counted) == 2
    tokens = [text + sum(p // 4 + 2 for p in patches) + 2 for text, patches, *_ in counted]
    assert max(tokens) <= 96 * 17 / 16, "texts are rounded"
    found = Counter({(s["text_tokens"], *s["patches"]): s["count"] for s in json.loads(file.read_text())["samples"]})
    assert found == Counter({(text, *patches): count for (text, patches, *_), count in counted.items()})
    for flags, words in (
        (LengthFlags(max_images=2), "give --seq-len as well"),
        (LengthFlags(max_videos=2), "give --seq-len as well"),
        (LengthFlags(7), "at least 8, and 1 of each other, are required"),
        (LengthFlags(8, max_clips=0), "at least 8, and 1 of each other, are required"),
    ):
        with pytest.raises(ValueError, match=words):
            flags.split()
    assert LengthFlags(96, max_clips=3, interleaved=True).split() == Split("items", 96, (None, 3, None), False)


def test_texts_keep_their_leading_digits() -> None:
    for tokens in [*range(70), 1000, 65_535]:
        assert abs(_leading(tokens) - tokens) <= tokens / 16
        assert np.binary_repr(_leading(tokens)).rstrip("0").__len__() <= 5


def test_of_many_sizes_some_stand_for_those_around_them() -> None:
    random = np.random.default_rng(7)
    drawn = zip(random.geometric(0.02, 5000).tolist(), random.integers(1, 300, (5000, 2)).tolist(), strict=True)
    found = Counter({Size(tokens, tuple(4 * p for p in patches)): int(tokens) for tokens, patches in drawn})
    assert thinned(found, len(found)) == found
    less = thinned(found, 400)
    assert len(less) <= 400
    assert less.keys() <= found.keys()
    assert sum(less.values()) == sum(found.values())
    for size in (lambda s: s[0], lambda s: sum(s[1])):
        means = [sum(size(s) * count for s, count in f.items()) / sum(f.values()) for f in (found, less)]
        assert means[1] == pytest.approx(means[0], rel=0.03)
    for most in (lambda s: s[0], lambda s: max(s[1]), lambda s: sum(s[1])):
        assert max(map(most, less)) == max(map(most, found))


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_full_disk_leaves_the_lists_that_are_there(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 4, 4)
    assert run("index", folder).returncode == 0
    with small_disk(tmp_path / "disk") as disk:
        for name in ("sizes.json", "bad.jsonl"):
            (disk / name).write_text("precious")
        fill(disk)
        before = {path.name: path.read_bytes() for path in disk.iterdir()}
        assert "(No space left on device); name" in refused("sizes", folder, "--output", disk / "sizes.json")
        listed = Quarantine.from_samples([("00000.tar", f"{key:040}") for key in range(200)])
        with pytest.raises(OutputError, match=r"--quarantine-file \S+ cannot be written \(No space left on device\)"):
            listed.save(disk / "bad.jsonl")
        assert {path.name: path.read_bytes() for path in disk.iterdir()} == before


def test_sizes_on_stdout_are_all_that_is_there(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 4, 4)
    assert run("index", folder).returncode == 0
    done = subprocess.run(command("sizes", folder, "--output", "-"), capture_output=True, text=True, timeout=120)
    assert sum(sample["count"] for sample in json.loads(done.stdout)["samples"]) == 4
    assert done.stderr.splitlines()[-1].startswith("4 samples of ")


def test_what_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 4, 4)
    assert "dataserver index" in refused("sizes", folder, "--output", tmp_path / "x")
    line = refused("sizes", folder, "--output", tmp_path / "x", "--patch", 300)
    assert line == "dataserver: patch: found 300; it should be less than or equal to 256"
    assert "no min_pixels and no max_pixels" in refused("sizes", folder, "--output", tmp_path / "x", "--rule", "qwen")
    assert run("index", folder).returncode == 0
    path = tmp_path / "nowhere" / "x"
    said = f"dataserver: --output {path} cannot be written (No such file or directory); name a file in a folder that"
    assert refused("sizes", folder, "--output", path).startswith(said)
    assert "--max-patches 1" in refused("sizes", folder, "--output", tmp_path / "x", "--max-patches", 1)


def test_a_filter_says_what_it_drops_for_a_null_and_that_nothing_is_left(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "d", 4, 2)
    (folder / "00001.parquet").unlink()
    names = [f"{key}.{kind}" for key in ("a", "b") for kind in ("jpg", "txt")]
    image = make_image(np.random.default_rng(0), 40, 30)
    write_tar(folder / "00001.tar", [(name, image if name.endswith("jpg") else b"words") for name in names])
    index(folder)
    found = run("sizes", folder, "--filter", "punsafe <= 1", "--output", tmp_path / "sizes.json")
    assert found.returncode == 0, found.stderr
    assert "2 of 4 are dropped, 2 of them because a column of the filter is null" in found.stdout
    empty = run("sizes", folder, "--filter", "punsafe > 1", "--output", tmp_path / "none.json")
    assert empty.returncode == 1
    assert "no sample of" in empty.stderr
    assert "4 of 4 are dropped, 2 of them because a column of the filter is null" in empty.stderr
    assert not (tmp_path / "none.json").exists()


def test_videos_are_counted_as_servers_size_them(tmp_path: Path) -> None:
    """Against the table that servers make of the same shard, sample by sample."""
    pytest.importorskip("av", reason="the extra video is not installed")
    dataset, tokenizer = Dataset.open(write_videos(tmp_path / "d", 1, 10)), load_tokenizer("bytes")
    sizing = {"max_patches": 64, "video": {"max_frames": 4, "min_pixels": 784, "max_pixels": 3136}}
    fields = {"datasets": [{"name": "d"}], "sizing": sizing, "generation": {"ratio": "0"}}
    stream = parse_job(fill_job(job_data(**fields), Catalog({"d": dataset}, {"bytes": tokenizer}))).stream
    table = ShardTables("", stream, [dataset], JobCache()).table(0, 0)
    assert table.image_modality is not None
    assert table.image_depths is not None
    patches = table.image_rows.astype(np.int64) * table.image_columns
    items = list(zip(table.image_modality.tolist(), table.image_depths.tolist(), patches.tolist(), strict=True))
    wanted = Counter(tuple(items[first:end]) for first, end in pairwise(table.image_offsets.tolist()))
    counted, found = (
        size_histogram(dataset, Rules(tokenizer.digest, stream.sizing), lambda _done, _total: None),
        Counter(),
    )
    for size, count in counted.sizes.items():
        plain = (0,) * len(size.patches), (1,) * len(size.patches)
        found[tuple(zip(size.modality or plain[0], size.groups or plain[1], size.patches, strict=True))] += count
    assert found == wanted
    assert max(depth for _, depth, _ in items) == 2
    total, is_video = counted.media[Modality.VIDEO], table.image_modality == VIDEO
    assert total.items == is_video.sum() > 5
    assert total.tokens == patches[is_video].sum() // 4
    assert total.seconds == pytest.approx(dataset.shards[0].sizes().image_microseconds.sum() / 1e6)


def test_clips_are_counted_as_servers_size_them(tmp_path: Path) -> None:
    """Against what a plan says of one clip at a time."""
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    folder = write_audio(tmp_path / "d", 1, 10)
    sizing = Sizing.model_validate({"max_patches": 64, "audio": {"merge": 1, "max_seconds": 2}})
    dataset = Dataset.open(folder)
    counted = size_histogram(dataset, Rules(load_tokenizer("bytes").digest, sizing), lambda _done, _total: None)
    total, found = counted.media[Modality.AUDIO], Counter[tuple[int, ...]]()
    sizes = dataset.shards[0].sizes()
    assert sizes.image_modality is not None
    for row in range(10):
        at = range(sizes.image_offsets[row], sizes.image_offsets[row + 1])
        clips = [i for i in at if sizes.image_modality[i] == AUDIO]
        frames = [clip_frames(int(sizes.image_width[i]), int(sizes.image_height[i]), sizing.audio) for i in clips]
        found[tuple(map(clip_positions, frames))] += 1
    positions = Counter[tuple[int, ...]]()
    for size, count in counted.sizes.items():
        modality = size.modality or (0,) * len(size.patches)
        positions[tuple(n for n, of in zip(size.patches, modality, strict=True) if of == AUDIO)] += count
    assert positions == found
    assert total.items == sum(len(clips) * count for clips, count in found.items()) > 5
    assert total.tokens == sum(sum(clips) * count for clips, count in found.items())
    assert total.seconds == pytest.approx(sum(
        int(w) / int(h) for w, h, of in zip(sizes.image_width, sizes.image_height, sizes.image_modality, strict=True)
        if of == AUDIO
    ))  # fmt: skip
    job, file = tmp_path / "job.json", tmp_path / "sizes.json"
    job.write_text(json.dumps({"stream": {"sizing": sizing.model_dump(mode="json", exclude_none=True)}}))
    done = run("sizes", folder, "--output", file, "--job", job, "--interleaved")
    assert f"{total.items} clips: {total.seconds:.1f} s, {total.tokens:,} tokens" in done.stdout, done.stderr
    read = read_sizes(file)
    assert read.sizing == sizing
    stream = Stream(4, 4096, generation=0.5, interleaved=True, sizing=read.sizing)
    load = workload(read.samples, stream).load(
        Network("ears", "encoder", ModelSize(2, 64, 256, 4, 4), modality="audio")
    )
    assert load.largest == max(max(clips, default=0) for clips in found)
    assert load.tokens == load.rows
