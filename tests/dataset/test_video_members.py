"""Videos in tars, tables and manifests: parts of samples where the user asks for it, else one finding a shard."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import make_image, write_tar
from video.clips import video
from video.datasets import SERVED

from dataserver.assembly import fault_of
from dataserver.dataset import Dataset, MediaMembers, build_index, lint
from dataserver.dataset.index.rules import IndexRules
from dataserver.planning.stream.samples import VIDEO
from dataserver.video import video_format_of

pytest.importorskip("av", reason="the extra video is not installed")
JPEG = make_image(np.random.default_rng(0), 40, 30)
CLIP = video("h264", 6)


def opened(folder: Path, members: list[tuple[str, bytes]], rules: IndexRules = SERVED) -> Dataset:
    write_tar(folder / "0.tar", members)
    build_index(folder, workers=1, rules=rules)
    return Dataset.open(folder, may_be_empty=True)


def kinds(dataset: Dataset) -> dict[str, int]:
    return dict(dataset.shards[0].findings().counts)


def test_videos_come_behind_images_with_their_sizes(tmp_path: Path) -> None:
    both = [("a.2.webm", video("vp9", 9)), ("a.10.mp4", CLIP), ("a.jpg", JPEG), ("a.txt", b"text")]
    dataset = opened(tmp_path, [*both, ("b.mov", video("mpeg4", 1)), ("b.txt", b"more")])
    shard = dataset.shards[0]
    assert [shard.parts(row).kinds for row in range(2)] == [(1, 1, 1, 0), (1, 0)]
    found = [(r.width, r.height, r.modality, r.frames) for r in shard.images([(0, 0), (0, 1), (0, 2), (1, 0)])]
    assert found == [(40, 30, 0, 0), (64, 48, VIDEO, 9), (64, 48, VIDEO, 6), (64, 48, VIDEO, 1)]
    assert [shard.image(0, n).microseconds for n in range(3)] == [0, 900_000, 600_000]
    assert dataset.read(shard.image(0, 1)) == both[0][1]
    assert shard.column("width").to_pylist() == [40, None]
    assert kinds(dataset) == {}
    expected = shard.sizes()
    for file in tmp_path.glob("*.numeric"):
        file.unlink()
    again = Dataset.open(tmp_path).shards[0].sizes()
    assert again.image_frames is not None
    assert expected.image_frames is not None
    assert again.image_frames.tolist() == expected.image_frames.tolist() == [0, 9, 6, 1]
    assert again.image_microseconds is not None
    assert again.image_microseconds.tolist() == [0, 900_000, 600_000, 100_000]


def test_an_index_with_videos_and_no_frames_of_them_is_refused(tmp_path: Path) -> None:
    dataset = opened(tmp_path, [("a.mp4", CLIP), ("a.txt", b"text")])
    index = dataset.shards[0].file.index_path
    with pa.ipc.open_file(index) as file:
        table = file.read_all()
    images = table.column("images").combine_chunks()
    kept = pa.struct([field for field in images.type.value_type if field.name not in ("frames", "microseconds")])
    parts = pa.StructArray.from_arrays([images.values.field(f.name) for f in kept], fields=[*kept])
    lists = pa.ListArray.from_arrays(images.offsets, parts)
    changed = table.set_column(4, pa.field("images", pa.list_(kept)), lists)
    with pa.ipc.new_file(index, changed.schema) as writer:
        writer.write_table(changed)
    for file in tmp_path.glob("*.numeric"):
        file.unlink()
    with pytest.raises(Exception, match="a video, and no frames"):
        Dataset.open(tmp_path).shards[0].sizes()


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("mp4", b"nothing", "unreadable_header"),
        ("mp4", CLIP[: len(CLIP) // 2], "unreadable_header"),
        ("avi", b"RIFF\0\0\0\0AVI LIST", "unreadable_header"),
        ("webm", b"", "unreadable_header"),
    ],
)
def test_videos_that_cannot_be_read_leave_their_sample_out(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    dataset = opened(tmp_path, [(f"a.{name}", content), ("a.txt", b"text"), ("b.mp4", CLIP), ("b.txt", b"more")])
    assert kinds(dataset) == {kind: 1}
    assert dataset.shards[0].keys() == ["b"]


def test_lint_decodes_videos(tmp_path: Path) -> None:
    shown = video("mkv", 12, key_every=12, between=0)
    damaged = bytearray(shown)
    middle = len(damaged) * 3 // 4
    damaged[middle : middle + 60] = bytes(60)
    opened(tmp_path, [("a.mkv", bytes(damaged)), ("a.txt", b"text"), ("b.mp4", CLIP), ("b.txt", b"more")])
    report = lint(tmp_path, judge=fault_of)
    assert set(report.counts) <= {"undecodable", "unreadable_header"}
    assert all(finding.key != "b" for finding in report.findings)


def test_without_the_rule_videos_are_one_finding_and_change_nothing_else(tmp_path: Path) -> None:
    members = [("a.mp4", CLIP), ("a.txt", b"text"), ("b.webm", video("vp9", 2)), ("b.txt", b"more")]
    ignored = opened(tmp_path / "ignored", members, IndexRules())
    assert kinds(ignored) == {"unused_video": 1, "unused_audio": 1}  # WebM may be either
    assert [ignored.shards[0].parts(row).kinds for row in range(2)] == [(0,), (0,)]
    assert not ignored.shards[0].may_have_videos
    served = opened(tmp_path / "served", members)
    assert served.fingerprint != ignored.fingerprint
    assert served.shards[0].may_have_videos


def test_webm_is_a_video_where_both_are_served(tmp_path: Path) -> None:
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    rules = IndexRules(audio=MediaMembers.SERVE, video=MediaMembers.SERVE)
    dataset = opened(tmp_path, [("a.webm", video("vp9", 2)), ("a.txt", b"text")], rules)
    assert dataset.shards[0].image(0, 0).modality == VIDEO


def test_transport_streams_are_videos_by_how_they_begin(tmp_path: Path) -> None:
    stream = video("ts", 7)
    pieces = [("a.ts", stream), ("b.ts", b"G" * 187 + stream), ("c.ts", stream[:500]), ("d.mp4", stream)]
    texts = [(f"{name[0]}.txt", b"text") for name, _ in pieces]
    dataset = opened(tmp_path, [member for both in zip(pieces, texts, strict=True) for member in both])
    found = [dataset.shards[0].image(row, 0) for row in range(2)]
    assert [(ref.frames, ref.microseconds, ref.width) for ref in found] == [(7, 700_000, 64)] * 2
    assert kinds(dataset) == {"unreadable_header": 2}
    assert fault_of(dataset.read(found[0]), found[0]) is None


SOURCE = "export const name: string = 'caf\u00e9';\n".encode() * 200
"""Of TypeScript."""


def test_sources_of_typescript_are_no_videos(tmp_path: Path) -> None:
    """They have the names of transport streams; a sample goes without them, as without any other file."""
    pieces = [("a.jpg", JPEG), ("a.ts", SOURCE), ("b.jpg", JPEG), ("b.ts", b""), ("c.mp4", CLIP), ("c.d.ts", SOURCE)]
    members = [*pieces, ("d.ts", video("ts", 7)), *((f"{key}.txt", b"text") for key in "abcd")]
    dataset = opened(tmp_path, sorted(members))
    shard = dataset.shards[0]
    assert shard.keys() == ["a", "b", "c", "d"]
    assert [shard.image(row, 0).modality for row in range(4)] == [0, 0, VIDEO, VIDEO]
    assert kinds(dataset) == {}


def test_text_that_has_the_byte_of_transport_streams_now_and_then_is_no_video() -> None:
    """As files of members whose types say nothing: sequences of genes, above all."""
    text = bytearray(b"A" * 4000)
    text[: 4 * 188 : 188] = b"GGGG"
    assert video_format_of(bytes(text)) is None
    found = video_format_of(video("ts", 3)[: 3 * 188])
    assert found is not None
    assert found.name == "mpegts"


def test_columns_of_parquet_and_paths_of_manifests(tmp_path: Path) -> None:
    """As the Hub's `Video` has them."""
    of = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": video("h264", n), "path": f"{n}.mp4"} for n in (2, 4)]
    (tmp_path / "table").mkdir()
    table = {"video": pa.array(rows, of), "text": ["one", "two"]}
    pq.write_table(pa.table(table), tmp_path / "table" / "0.parquet")
    build_index(tmp_path / "table", workers=1, rules=SERVED)
    shard = Dataset.open(tmp_path / "table").shards[0]
    assert [shard.image(row, 0).frames for row in range(2)] == [2, 4]
    lines = tmp_path / "lines"
    (lines / "clips").mkdir(parents=True)
    (lines / "clips" / "a.mp4").write_bytes(CLIP)
    objects = [{"video": "clips/a.mp4", "text": "one"}, {"video": ["clips/a.mp4", "clips/b.mp4"], "text": "two"}]
    (lines / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in objects))
    build_index(lines, workers=1, rules=SERVED)
    shard = Dataset.open(lines).shards[0]
    assert shard.num_samples == 1
    assert shard.image(0, 0).frames == 6
    assert dict(shard.findings().counts) == {"missing_image": 1}
