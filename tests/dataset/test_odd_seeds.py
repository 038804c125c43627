"""Odd and hostile shards of many seeds: what is served, and what is found, are what the generator says.

And nothing is lost: each member, row and file belongs to a sample that is served, to a finding, or to what
docs/datasets.md says is ignored.
"""

import json
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from dataset.odd_manifest import said, samples
from make_odd_shards import make, make_as
from odd_shards.formats import WRITERS
from odd_shards.shards import make_shard

from dataserver.dataset import (
    IMAGE,
    KINDS,
    Dataset,
    Effect,
    IndexRules,
    LintReport,
    TextOnly,
    TruncatedImages,
    build_index,
    lint,
)
from dataserver.images import fault_of, silence_pillow_warnings

SEEDS = 20
"""In continuous integration; a thousand with --long."""
AT_ONCE = 10
IGNORED = ("README", ".hidden.txt", "folder/.hidden", "._0.jpg")
"""Names that make no sample: a dot at the beginning of the last part, or what tells of a dataset."""


def check(folder: Path, seed: int) -> None:
    text_only, truncated = list(TextOnly)[seed % 2], list(TruncatedImages)[seed // 2 % 2]
    accepts = truncated is TruncatedImages.ACCEPT
    manifest = make(folder, seed, text_only is TextOnly.ALLOW, accepts, light=seed % 60 != 0)
    build_index(folder, workers=1, rules=IndexRules(text_only, allow_duplicates=True, truncated_images=truncated))
    found = lint(folder, judge=fault_of, quarantine_file=folder.with_name("list"))
    assert Counter((f.shard, f.key, f.kind) for f in found.findings) == Counter(said(manifest)), seed
    served = {(shard.name, key) for shard in Dataset.open(folder).shards for key in list(shard.keys())}
    expected = {place for place, sample in samples(manifest) if sample["verdict"] != "left out"}
    assert served == expected, seed
    listed = {tuple(json.loads(line)) for line in folder.with_name("list").read_text().splitlines()}
    assert listed == {place for place, sample in samples(manifest) if sample["verdict"] != "served"}, seed
    for shard in Dataset.open(folder).shards:
        count_members(folder / shard.name, set(shard.keys()), found, seed)
        count_rows(folder / shard.name, set(shard.keys()), found, seed)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {f for f in files if f.startswith("unread/")} == manifest["files"].keys()


def count_members(path: Path, served: set[str], found: LintReport, seed: int) -> None:
    """As Python's own `tarfile` sees the members, where it reads the tar to its end."""
    own = [f for f in found.findings if f.shard == path.name]
    if any(f.kind in ("cut_tar", "corrupt_tar", "trailing_data", "extension_too_large") for f in own):
        return
    left_out = {f.key for f in own if KINDS[f.kind] is Effect.LEFT_OUT and f.key}
    unsafe = keyless = 0
    with tarfile.open(path, ignore_zeros=path.name == "joined.tar") as tar:
        for member in tar:
            if member.isdir() or member.name in IGNORED:
                continue
            name = member.name.removeprefix("./")
            if "." not in name.split("/")[-1] and len(name) <= 1024 and member.name.isprintable():
                keyless += 1
                continue
            key = "/".join([*name.split("/")[:-1], name.split("/")[-1].partition(".")[0]])
            is_unsafe = not name.isprintable() or name.startswith("/") or ".." in name.split("/") or len(name) > 1024
            if is_unsafe and key not in served:
                unsafe += 1
                continue
            assert (key in served) + (key in left_out) >= 1, (seed, path.name, member.name)
    assert unsafe == sum(f.kind == "unsafe_name" for f in own), (seed, path.name)
    said = [f.detail.partition(" members have no dot")[0] for f in own if f.kind == "unused_part" and not f.key]
    assert said == [str(keyless)] * bool(keyless), (seed, path.name)


def count_rows(path: Path, served: set[str], found: LintReport, seed: int) -> None:
    own = [f for f in found.findings if f.shard == path.name]
    if not path.with_suffix(".parquet").exists() or any(f.kind == "bad_sidecar" for f in own):
        return
    rows = pq.read_table(path.with_suffix(".parquet")).column("key").to_pylist()
    left_out = {f.key for f in own if KINDS[f.kind] is Effect.LEFT_OUT}
    lost = [key for key in rows if key not in served | left_out]
    num_repeated = len(rows) - len({*rows})
    details = [f.detail for f in own if f.kind == "row_without_sample"]
    repeated = [f"{num_repeated} of {len(rows)} rows of {path.stem}.parquet repeat" in detail for detail in details]
    assert sum(repeated) == bool(num_repeated), (seed, path.name)
    details = [detail for detail, is_of_repeated in zip(details, repeated, strict=True) if not is_of_repeated]
    assert [f"{len(lost)} of {len(rows)} rows" in detail for detail in details] == [True] * bool(lost), (
        seed,
        path.name,
    )


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_what_is_served_and_found_is_what_the_generator_says(tmp_path: Path, first: int) -> None:
    silence_pillow_warnings()
    for seed in range(first, first + AT_ONCE):
        check(tmp_path / f"{seed}" / "d", seed)


def content(dataset: Dataset) -> dict[str, tuple[object, ...]]:
    """Kinds, texts and images of each sample that is served, by its key."""
    shard, found = dataset.shards[0], {}
    for row, key in enumerate(shard.keys()):
        parts = shard.parts(row)
        images = [dataset.read(shard.image(row, n)) for n in range(parts.kinds.count(IMAGE))]
        found[key] = (parts.kinds, parts.texts, images)
    return found


def check_formats(folder: Path, seed: int) -> None:
    """The mixture in each format: verdicts and findings are what the generator says, samples are those of the tar."""
    text_only, truncated = list(TextOnly)[seed % 2], list(TruncatedImages)[seed // 2 % 2]
    rules = IndexRules(text_only, truncated_images=truncated)
    (folder / "tar").mkdir(parents=True)
    (folder / "tar/mixture.tar").write_bytes(make_shard("mixture", seed, light=True).content)
    build_index(folder / "tar", workers=1, rules=rules)
    as_tar = content(Dataset.open(folder / "tar"))
    for kind in WRITERS:
        named, manifest = make_as(
            folder / kind, kind, seed, text_only is TextOnly.ALLOW, truncated is TruncatedImages.ACCEPT
        )
        build_index(Path(named), workers=1, rules=rules)
        found = lint(Path(named), judge=fault_of)
        assert Counter((f.shard, f.key, f.kind) for f in found.findings) == Counter(said(manifest)), (seed, kind)
        served = content(Dataset.open(Path(named)))
        assert served.keys() == {key for (_, key), one in samples(manifest) if one["verdict"] != "left out"}
        assert {key: one for key, one in served.items() if key in as_tar and one != as_tar[key]} == {}, (seed, kind)
        assert len(served.keys() & as_tar.keys()) > 40, (len(served), len(as_tar))


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in (4, 8))])
def test_samples_are_judged_and_served_alike_in_all_formats(tmp_path: Path, first: int) -> None:
    """Four seeds have all rules between them."""
    silence_pillow_warnings()
    for seed in range(first, first + 4):
        check_formats(tmp_path / f"{seed}", seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(SEEDS, 1000, 20))
def test_a_thousand_seeds(tmp_path: Path, first: int) -> None:
    silence_pillow_warnings()
    for seed in range(first, first + 20):
        check(tmp_path / f"{seed}" / "d", seed)
