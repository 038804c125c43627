"""Members and columns that other folders bring for the same keys: what is joined, found, refused, and made again."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import make_image, write_tar

from dataserver.dataset import Dataset, DatasetError, IndexRules, ShardReadError, build_index, lint, parse_captions
from dataserver.dataset.index import joins as joins_module
from dataserver.dataset.index.build import Part

JPEG = make_image(np.random.default_rng(0), 32, 32)


def write_table(path: Path, **columns: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of images; texts in one other folder, recaptions and columns in another one."""
    for shard in ("0", "sub/1"):
        name = shard[-1]
        members = [(f"{name}{n}.jpg", JPEG) for n in range(3)]
        write_tar(tmp_path / "images" / f"{shard}.tar", members)
        texts = [(f"{name}{n}.txt", f"text {name}{n}".encode()) for n in (2, 0, 1)]
        write_tar(tmp_path / "texts" / f"{shard}.tar", texts)
    recaptions = [("00.re.json", b'{"long": "long 00"}'), ("02.re.json", b'{"long": "long 02"}')]
    write_tar(tmp_path / "more" / "0.tar", [*recaptions, ("9.re.json", b"{}")])
    write_table(tmp_path / "more" / "0.parquet", key=["01", "00", "7"], score=[0.1, 0.2, 0.3], blip=["b", None, "c"])
    return tmp_path


def index(folder: Path, *joins: str, captions: tuple[str, ...] = ()) -> tuple[Dataset, int]:
    rules = IndexRules(captions=parse_captions(captions), joins=tuple(folder / join for join in joins))
    report = build_index(folder / "images", workers=1, rules=rules)
    return Dataset.open(folder / "images", may_be_empty=True), report.num_built


def rows(dataset: Dataset, *columns: str) -> list[tuple[Any, ...]]:
    found = []
    for shard in dataset.shards:
        values = [shard.column(c).to_pylist() if c in shard.columns else [None] * shard.num_samples for c in columns]
        found += [(key, shard.parts(row).texts[0], *(v[row] for v in values)) for row, key in enumerate(shard.keys())]
    return found


def test_texts_captions_and_columns_are_joined_by_key(folder: Path) -> None:
    without, _ = index(folder)
    assert sum(shard.num_samples for shard in without.shards) == 0
    captions = ("long=re.json:long", "blip=parquet:blip")
    dataset, _ = index(folder, "texts", "more", captions=captions)
    assert rows(dataset, "caption.long", "caption.blip", "score") == [
        ("00", "text 00", "long 00", None, 0.2),
        ("01", "text 01", None, "b", 0.1),
        ("02", "text 02", "long 02", None, None),
        ("10", "text 10", None, None, None),
        ("11", "text 11", None, None, None),
        ("12", "text 12", None, None, None),
    ]
    assert dataset.captions == ["blip", "long"]
    texts_alone, _ = index(folder, "texts")
    assert len({without.fingerprint, dataset.fingerprint, texts_alone.fingerprint}) == 3


def test_missing_partners_are_findings(folder: Path) -> None:
    index(folder, "texts", "more")
    said = [(f.shard, f.kind, f.detail) for f in lint(folder / "images").findings]
    more = folder / "more"
    assert said == [
        ("0.tar", "row_without_sample", f"1 of 3 keys of {more / '0.tar'} have no sample, the first is '9'"),
        ("0.tar", "sample_without_row", f"1 of 3 samples have nothing in {more / '0.tar'}, the first is '01'"),
        (
            "0.tar",
            "sample_without_row",
            "1 of 3 samples have no row in 0.parquet, the first is '02'; their columns are null, which no comparison"
            " holds for",
        ),
        ("0.tar", "row_without_sample", "1 of 3 rows of 0.parquet have no sample in the tar, the first is '7'"),
        (
            "sub/1.tar",
            "missing_partner",
            f"{more} has no file of this name: what is joined from there lacks for all samples of the shard"[:200],
        ),
    ]
    write_tar(folder / "texts" / "0.tar", [("00.txt", b"a")])
    index(folder, "texts")
    found = {(f.key, f.kind, f.detail) for f in lint(folder / "images").findings if f.shard == "0.tar"}
    lacking = f"2 of 3 samples have nothing in {folder / 'texts' / '0.tar'}, the first is '01'"
    assert ("", "sample_without_row", lacking) in found
    assert {(key, kind) for key, kind, _ in found if key} == {("01", "missing_caption"), ("02", "missing_caption")}


def test_only_what_changed_is_made_again(folder: Path) -> None:
    first, built = index(folder, "texts", "more")
    assert built == 2
    again, built = index(folder, "texts", "more")
    assert (built, again.fingerprint) == (0, first.fingerprint)
    write_tar(folder / "texts" / "sub/1.tar", [(f"1{n}.txt", b"new") for n in range(3)])
    changed, built = index(folder, "texts", "more")
    assert built == 1
    assert rows(changed)[-1] == ("12", "new")
    assert changed.fingerprint != first.fingerprint
    (folder / "more" / "0.parquet").unlink()
    removed, built = index(folder, "texts", "more")
    assert (built, "score" in removed.shards[0].known_columns) == (1, False)
    assert index(folder, "texts")[1] == 2, "another rule"
    assert not [path for path in (folder / "images").rglob("*.joined") if b"more" in path.read_bytes()]


def test_a_join_that_matches_nothing_is_refused(folder: Path) -> None:
    write_tar(folder / "other" / "0.tar", [("x.txt", b"a"), ("y.txt", b"b")])
    with pytest.raises(DatasetError, match=r"nothing in \S+other/0.tar belongs to a sample: .* '00' where it says 'x'"):
        index(folder, "other")
    with pytest.raises(DatasetError, match=r"nothing in \S+other/0.tar belongs to a sample"):
        index(folder, "texts", "other")
    write_table(folder / "table" / "0.parquet", key=["x"], score=[1.0])
    with pytest.raises(DatasetError, match=r"table/0.parquet, which is joined, cannot be used \(no row of 0.parquet"):
        index(folder, "table")
    (folder / "empty").mkdir()
    for name in ("empty", "nowhere", "more/0.tar"):
        with pytest.raises(DatasetError, match=rf"--join \S+{name} has no file for any of the 2 shards; a folder"):
            index(folder, name)
    for joins in (("texts", "texts"), ("images",), ("images/sub",)):
        with pytest.raises(DatasetError, match="names a folder twice, or the dataset's own"):
            index(folder, *joins)


def test_two_that_bring_the_same_are_refused(folder: Path) -> None:
    write_tar(folder / "again" / "0.tar", [("01.txt", b"other")])
    with pytest.raises(DatasetError, match=r"texts/0.tar and \S+again/0.tar bring the same member .txt of sample '01'"):
        index(folder, "texts", "again")
    write_table(folder / "scores" / "0.parquet", key=["00"], score=[1.0])
    with pytest.raises(DatasetError, match=r"scores/0.parquet brings the column 'score', which the samples have"):
        index(folder, "texts", "more", "scores")
    write_tar(folder / "images" / "0.tar", [("00.jpg", JPEG), ("00.txt", b"own")])
    with pytest.raises(DatasetError, match=r"the shard itself and \S+texts/0.tar bring the same member .txt of sample"):
        index(folder, "texts")


def test_a_broken_partner_costs_what_it_brings_and_no_more(folder: Path) -> None:
    path = folder / "texts" / "0.tar"
    data = path.read_bytes()
    os.truncate(path, len(data) // 2)
    dataset, _ = index(folder, "texts")
    findings = lint(folder / "images").counts
    assert findings["cut_tar"] == 1
    assert [key for key, *_ in rows(dataset)][-3:] == ["10", "11", "12"]
    (folder / "more" / "0.parquet").write_bytes(b"no parquet")
    with pytest.raises(DatasetError, match=r"more/0.parquet, which is joined, cannot be used"):
        index(folder, "more")


def test_json_of_a_join_makes_columns(folder: Path) -> None:
    write_tar(
        folder / "json" / "0.tar", [(f"0{n}.json", json.dumps({"caption": f"c{n}", "n": n}).encode()) for n in range(3)]
    )
    dataset, _ = index(folder, "json")
    assert rows(dataset, "n") == [("00", "c0", 0), ("01", "c1", 1), ("02", "c2", 2)]


def test_of_a_member_that_comes_twice_in_a_join_the_first_is_used_and_said(folder: Path) -> None:
    write_tar(folder / "texts" / "0.tar", [("00.txt", b"first"), ("01.txt", b"b"), ("02.txt", b"c"), ("00.txt", b"d")])
    dataset, _ = index(folder, "texts")
    assert rows(dataset)[0] == ("00", "first")
    (found,) = lint(folder / "images").findings
    where = folder / "texts" / "0.tar"
    assert (found.key, found.kind) == ("00", "duplicate_member")
    assert found.detail == f"00.txt comes twice in {where}, which is joined; the first is used"[:200]


def test_a_broken_image_of_a_join_costs_a_sample_with_an_image_nothing(folder: Path) -> None:
    more = [("00.txt", b"a"), ("00.png", b"broken"), ("01.txt", b"b"), ("02.txt", b"c"), ("02.png", b"")]
    write_tar(folder / "texts" / "0.tar", more)
    dataset, _ = index(folder, "texts")
    assert [key for key, *_ in rows(dataset)][:3] == ["00", "01", "02"]
    assert [(f.key, f.kind) for f in lint(folder / "images").findings] == [("00", "unused_part"), ("02", "unused_part")]


def test_joined_members_say_nothing_of_where_a_tar_was_cut(folder: Path) -> None:
    path = folder / "images" / "0.tar"
    os.truncate(path, path.read_bytes().rindex(JPEG) + -(-len(JPEG) // 512) * 512)
    index(folder, "texts")
    assert lint(folder / "images").counts == {"cut_tar": 1}
    assert [shard.num_samples for shard in Dataset.open(folder / "images").shards] == [3, 3]


def test_files_of_another_folder_are_others_whatever_their_times(folder: Path) -> None:
    for name, score in (("a", 1.0), ("b", 2.0)):
        write_table(folder / name / "0.parquet", key=["00"], score=[score])
    first, _ = index(folder, "texts", "a")
    (noted,) = [path for path in (folder / "images").glob("*.joined") if "parquet" in path.read_text()]
    state = json.loads(noted.read_text())
    other = (folder / "b" / "0.parquet").stat()
    state["files"][1][1:] = [other.st_size, other.st_mtime_ns, other.st_ctime_ns]  # as if both were written at once
    noted.write_text(json.dumps(state))
    second, built = index(folder, "texts", "b")
    assert (built, rows(second, "score")[0]) == (1, ("00", "text 00", 2.0))
    assert second.fingerprint != first.fingerprint


def test_a_part_of_the_shards_may_have_no_partner(folder: Path) -> None:
    (folder / "more" / "0.tar").unlink()
    (folder / "more" / "0.parquet").rename(folder / "more" / "elsewhere.txt")
    write_table(folder / "more" / "sub/1.parquet", key=["10"], score=[0.5])
    rules = IndexRules(joins=(folder / "texts", folder / "more"))
    for number in range(2):
        assert build_index(folder / "images", workers=1, rules=rules, part=Part(number, 2)).num_built == 1
    assert ("10", "text 10", 0.5) in rows(Dataset.open(folder / "images"), "score")


class Elsewhere:
    """An engine whose tasks run in another folder, as those of Ray do; `before` is done first."""

    num_workers = 1

    def __init__(self, folder: Path, before: Callable[[], object] = lambda: None) -> None:
        self.folder, self.before = folder, before

    def run(self, work: Callable[[Any], Any], tasks: Sequence[Any], num_workers: int) -> Iterator[tuple[int, Any]]:
        assert num_workers == 1
        self.before()
        with contextlib.chdir(self.folder):
            yield from enumerate(map(work, tasks))


def test_relative_paths_mean_the_same_on_other_machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    rules = IndexRules(joins=(Path("texts"),))
    engine = Elsewhere(folder / "texts")
    assert build_index(Path("images"), Path("index"), rules=rules, engine=engine).num_built == 2
    dataset = Dataset.open(folder / "images", folder / "index")
    assert rows(dataset)[0] == ("00", "text 00")


def test_a_machine_that_does_not_see_a_joined_file_fails(folder: Path) -> None:
    engine = Elsewhere(folder, lambda: (folder / "texts").rename(folder / "unmounted"))
    with pytest.raises(ShardReadError, match=r"cannot read shard .*No such file.*texts"):
        build_index(folder / "images", rules=IndexRules(joins=(folder / "texts",)), engine=engine)
    (folder / "unmounted").rename(folder / "texts")
    (folder / "texts" / "0.tar").unlink()
    (folder / "texts" / "0.tar").symlink_to(folder / "gone")
    with pytest.raises(DatasetError, match=r"--join cannot be read: .*No such file"):
        index(folder, "texts")


def test_tables_may_not_have_more_files_than_are_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins_module, "MOST_TABLE_FILES", 2)
    for name in ("a", "b"):
        for number in range(2):
            write_table(folder / name / f"t{number}.parquet", key=["00"], **{name: [1]})
    with pytest.raises(DatasetError, match=r"the tables of --join have 4 parquet files, limit 2 in all"):
        index(folder, "texts", "a", "b")


def test_a_table_that_changes_while_shards_are_read_is_noticed(folder: Path) -> None:
    write_table(folder / "t" / "all.parquet", key=["00"], score=[1.0])
    engine = Elsewhere(folder, lambda: write_table(folder / "t" / "all.parquet", key=["00", "01"], score=[1.0, 2.0]))
    rules = IndexRules(joins=(folder / "texts", folder / "t"))
    with pytest.raises(ShardReadError, match="a joined table changed while it was read"):
        build_index(folder / "images", rules=rules, engine=engine)
    dataset, _ = index(folder, "texts", "t")
    assert rows(dataset, "score")[:2] == [("00", "text 00", 1.0), ("01", "text 01", 2.0)]
