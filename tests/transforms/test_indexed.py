"""Transforms of text and metadata: applied by `dataserver index`, and what jobs make of them."""

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from builders.jobs import compose, module
from shards import write_pairs
from transforms.packages import METADATA, TEXT, write_package

from dataserver.assembly import load_tokenizer
from dataserver.cli import main
from dataserver.dataset import Dataset, FilterError, Shard, StaleIndexError, TokensMissingError, texts_key
from dataserver.dataset.index.derived import derived_digest
from dataserver.dataset.index.flags import transform_flags
from dataserver.dataset.storage.index_mirror import _OF_INDEX
from dataserver.jobs import Catalog, DatasetMismatchError, JobPlanner, fill_job, statistics_cache
from dataserver.jobs.cache import JobCache
from dataserver.jobs.shard_statistics import compute_statistics
from dataserver.planning.job.fields import InstalledTransform, key_of
from dataserver.planning.job.identity import Job, JobSpecError, parse_job
from dataserver.planning.stream.captions import text_key
from dataserver.planning.stream.statistics import ShardStatistics
from dataserver.serving.config import load_config
from dataserver.transforms import parse_transform

SHOUT = {"name": "shout", "version": "3.1", "options": {"end": "!"}}
SHOUT_FLAG = 'shout=3.1:{"end":"!"}'
LENGTHS = {"name": "lengths", "version": "0.4", "options": {"least": 20}}
LENGTHS_FLAG = 'lengths=0.4:{"least":20}'
DIGEST = load_tokenizer("bytes").digest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pairs in two shards, indexed with both transforms."""
    found = write_pairs(tmp_path_factory.mktemp("shards") / "pairs", 8, 4)
    assert main(["index", str(found), "--workers", "1", "--transform", SHOUT_FLAG, "--transform", LENGTHS_FLAG]) == 0
    return found


def opened(folder: Path, index_dir: Path | None = None) -> Catalog:
    index_dirs = {} if index_dir is None else {"pairs": index_dir}
    return Catalog.open(load_config(None, {"datasets": {"pairs": folder}, "index_dirs": index_dirs}))


def job_of(catalog: Catalog, global_batch: int = 4, **dataset: Any) -> Job:
    data = compose(
        modules=[module("encoder", dp=1), module("backbone", dp=1)],
        datasets=[{"name": "pairs", **dataset}],
        seq_len=512,
        global_batch=global_batch,
        packing={"enabled": False},
        sizing={"max_patches": 64},
        end={"epochs": 1},
    )
    return parse_job(fill_job(data, catalog))


def planner(folder: Path, global_batch: int = 4, **dataset: Any) -> JobPlanner:
    catalog = opened(folder)
    job = job_of(catalog, global_batch, **dataset)
    return JobPlanner(job, catalog.find_datasets(job.stream))


def texts_of(dataset: Dataset) -> list[str]:
    return [shard.parts(row).texts[0] for shard in dataset.shards for row in range(shard.num_samples)]


def ids_of(dataset: Dataset, key: str) -> list[str]:
    """The texts that byte tokens spell."""
    rows = [(shard.position, row) for shard in dataset.shards for row in range(shard.num_samples)]
    return [bytes(dataset.document(*at, key).texts[0].astype(np.uint8)).decode() for at in rows]


def test_tokens_are_those_of_transformed_texts_and_the_others_stay(folder: Path) -> None:
    dataset = Dataset.open(folder)
    key = InstalledTransform(**SHOUT).key()
    assert ids_of(dataset, texts_key(DIGEST)) == texts_of(dataset)
    assert ids_of(dataset, texts_key(DIGEST, text_key("own", key))) == [f"{t.upper()}!" for t in texts_of(dataset)]


def test_a_plan_counts_the_tokens_of_transformed_texts(folder: Path) -> None:
    plain, shouted = planner(folder).plan(0).samples, planner(folder, text_transforms=[SHOUT]).plan(0).samples
    assert sorted(plain.sample) == sorted(shouted.sample)
    assert sum(shouted.tokens) == sum(plain.tokens) + len(plain)


def test_streams_differ_in_name_version_and_options(folder: Path) -> None:
    jobs = [{}, {"text_transforms": [SHOUT]}, {"metadata_transforms": [LENGTHS]}]
    assert len({planner(folder, **dataset).job.stream_id for dataset in jobs}) == 3


@pytest.fixture
def other(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another index of the dataset, made by other functions of the same versions."""
    for name, version, code, kind, point in (
        ("tables", "0.4", METADATA, "metadata", "lengths"),
        ("shouts", "3.1", TEXT, "text", "shout"),
    ):
        module = f"disttrain_test_{name}"
        code = code.replace("EXTRA = 0", "EXTRA = 1")
        write_package(tmp_path / "packages", name, version, module, code, {kind: {point: f"{module}:{point}"}})
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    flags = ["--index-dir", str(tmp_path / "index"), "--transform", SHOUT_FLAG, "--transform", LENGTHS_FLAG]
    assert main(["index", str(folder), "--workers", "1", *flags]) == 0
    return tmp_path / "index"


def test_what_transforms_made_is_a_part_of_the_stream(folder: Path, other: Path, tmp_path: Path) -> None:
    """Names, versions, options and fingerprint are the same, and yet samples differ."""
    shutil.copytree(folder, tmp_path / "copy")
    first, second, copy = opened(folder), opened(folder, other), opened(tmp_path / "copy")
    assert job_of(first) == job_of(second)
    for dataset in ({"metadata_transforms": [LENGTHS]}, {"text_transforms": [SHOUT]}):
        job = job_of(first, **dataset)
        assert job == job_of(copy, **dataset)
        assert copy.find_datasets(job.stream)
        assert job.stream_id != job_of(second, **dataset).stream_id
        refused = r"the job was made with the transformed data \w+, this server has \w+\. Copy the index"
        with pytest.raises(DatasetMismatchError, match=refused):
            second.find_datasets(job.stream)
        assert parse_job(fill_job(json.loads(job.text), second)) == job, "what is stated stays"
    with pytest.raises(JobSpecError, match="transformed is stated, and no transform"):
        job_of(first, transformed="0" * 64)


def test_a_shard_that_is_transformed_again_is_not_served_to_old_jobs(folder: Path, other: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    dataset = Dataset.open(tmp_path / "copy")
    key = InstalledTransform(**LENGTHS).key()
    dataset.transformed([key], [])
    for path in other.glob("*.derived-*"):
        shutil.copy(path, tmp_path / "copy")
    with pytest.raises(StaleIndexError, match="was transformed again"):
        dataset.shards[0].keep(transforms=[key])


@pytest.mark.parametrize("dataset", [{"metadata_transforms": [LENGTHS]}, {"text_transforms": [SHOUT]}])
def test_statistics_are_computed_once_for_what_transforms_made(
    dataset: dict[str, Any], folder: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []

    def computed(shards: Sequence[Shard], *rest: Any) -> list[ShardStatistics]:
        counted.append(len(shards))
        return compute_statistics(shards, *rest)

    monkeypatch.setattr(statistics_cache, "STORED_FROM_S", 0)
    monkeypatch.setattr(statistics_cache, "compute_statistics", computed)
    for catalog in (opened(folder), opened(folder), opened(folder, other)):
        job = job_of(catalog, filter="width > 1", **dataset)
        JobPlanner(job, catalog.find_datasets(job.stream), JobCache(cache_dir=tmp_path))
    assert counted == [2, 0, 2]


def test_derived_digests_cover_values_and_not_how_they_are_stored() -> None:
    values = {"a": [1, None, 3], "b": ["x", "yz", None], "c": [1.5, None, 0.0], "d": [True, None, False]}
    whole = pa.table(values)
    parts = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    assert derived_digest(whole) == derived_digest(parts)
    others = [
        {**values, name: [*values[name][:1], *more]}  # type: ignore[index]
        for name, more in (("a", [0, 3]), ("b", ["y", "z"]), ("c", [0.0, 0.0]), ("d", [False, False]))
    ]
    assert len({derived_digest(pa.table(one)) for one in (values, *others)}) == 5
    assert derived_digest(whole.rename_columns(["a", "b", "c", "e"])) != derived_digest(whole)


def test_jobs_with_other_options_name_the_command_that_is_missing(folder: Path) -> None:
    for field, transform in (("text_transforms", SHOUT), ("metadata_transforms", LENGTHS)):
        for change in ({"version": "9"}, {"options": {"least": 21}}):
            with pytest.raises(TokensMissingError, match=f"{transform['name']}=.*run: dataserver index .* --transform"):
                planner(folder, **{field: [{**transform, **change}]})


def test_commands_are_written_for_a_shell() -> None:
    chain = [InstalledTransform(name="a", version="1", options={"x": "it's; b=2 {}"}), InstalledTransform(**SHOUT)]
    named = shlex.split(transform_flags(key_of([*chain, InstalledTransform(name="c", version="3")])))
    assert named[::2] == ["--transform"] * 3
    assert [parse_transform(entry) for entry in named[1:4:2]] == chain
    assert named[5] == "c=3"


def test_metadata_leaves_samples_out_and_filters_name_its_columns(folder: Path) -> None:
    lengths = {text: len(text) for text in texts_of(Dataset.open(folder))}
    assert len(set(lengths.values())) > 2
    limit = sorted(lengths.values())[4]

    def left(**dataset: Any) -> int:
        return planner(folder, global_batch=1, metadata_transforms=[LENGTHS], **dataset).num_steps

    long_enough = sum(length >= 20 for length in lengths.values())
    assert 0 < long_enough < 8
    assert left() == long_enough
    shorter = sum(20 <= length <= limit for length in lengths.values())
    assert left(filter=f"length <= {limit}") == shorter
    with pytest.raises(FilterError, match="length"):
        planner(folder, filter=f"length <= {limit}")
    with pytest.raises(FilterError, match=r"which no shard has; the columns are: .*length"):
        left(filter="lenght <= 4")


def test_what_is_there_is_not_made_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.tar.*-*")}
    assert sum(".derived-" in path.name for path in before) == 2
    assert all(_OF_INDEX.fullmatch(path.name) for path in before if ".derived-" in path.name), "stores get them too"
    assert main(["index", str(folder), "--transform", LENGTHS_FLAG]) == 0
    assert "0 shards transformed now (lengths=0.4" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path in before} == before


def test_a_damaged_file_counts_as_missing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for path in folder.iterdir():
        content = path.read_bytes()
        (tmp_path / "d" / path.name).write_bytes(content[: len(content) // 2] if ".derived-" in path.name else content)
    assert main(["index", str(tmp_path / "d"), "--workers", "1"]) == 0
    with pytest.raises(TokensMissingError, match="has a file that cannot be read"):
        planner(tmp_path / "d", metadata_transforms=[LENGTHS])
    assert main(["index", str(tmp_path / "d"), "--workers", "1", "--transform", LENGTHS_FLAG]) == 0
    planner(tmp_path / "d", metadata_transforms=[LENGTHS])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("bytes_of=3.1", "the transform bytes_of=3.1: it returned bytes; a text is required"),
        ("fewer=0.4", r"it returned a table of 3 rows; a table of 4 rows is required"),
        ("tint=1.2.0", "tint=1.2.0 is a transform of pixels"),
        ("shout=3.2", "installed in version 3.1, and 3.2 is named"),
        ("shout", "NAME=VERSION is required"),
        ("shout=3.1:{", "its options are no JSON"),
        ('shout=3.1:{"end":1.5}', "options.end"),
    ],
)
def test_what_cannot_be_applied(folder: Path, flag: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(folder), "--workers", "1", "--transform", flag]) != 0
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_a_text_that_a_transform_fails_for_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_pairs(tmp_path / "d", 4, 4)
    assert main(["index", str(folder), "--workers", "1"]) == 0
    third = {**SHOUT, "options": {"secret": texts_of(Dataset.open(folder))[2]}}
    flags = ["index", str(folder), "--workers", "1", "--transform", f"shout=3.1:{json.dumps(third['options'])}"]
    assert main(flags) != 0
    assert "it raised ValueError: it is secret" in capsys.readouterr().err.replace("\n", " ")
    assert main([*flags, "--on-token-error", "skip"]) == 0
    assert "1 text_transform" in capsys.readouterr().out
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["lint", str(folder), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["kind"], found["effect"]) == ("text_transform", "left out")
    assert planner(folder, global_batch=1).num_steps == 4
    assert planner(folder, global_batch=1, text_transforms=[third]).num_steps == 3


def test_conversations_have_no_transforms_of_text(folder: Path) -> None:
    with pytest.raises(JobSpecError, match="rendered by a template; leave text_transforms out"):
        planner(folder, text_transforms=[SHOUT], conversations={"template": "0" * 64})


def test_commands_know_the_columns_that_transforms_made(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = [len(text) for text in texts_of(Dataset.open(folder))]
    limit, short = sorted(lengths)[4], sum(length < 20 for length in lengths)
    named = ["--transform", LENGTHS_FLAG]
    assert main(["describe", str(folder), *named]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"length \(lengths 0\.4\) +int64 .* 0\.0 %", shown)
    assert f"left out     {short} of the samples, by transforms" in shown
    job, file = tmp_path / "job.json", tmp_path / "sizes.json"
    job.write_text(json.dumps({"stream": {"datasets": [{"name": "pairs", "filter": f"length <= {limit}"}]}}))
    assert main(["describe", str(folder), "--job", str(job)]) != 0
    assert "length" in capsys.readouterr().err
    assert main(["describe", str(folder), "--job", str(job), *named]) == 0
    dropped = sum(length > limit for length in lengths)
    assert re.search(rf"length <= {limit} +{dropped} ", capsys.readouterr().out)
    assert main(["sizes", str(folder), "--output", str(file), *named]) == 0
    assert f"; {short} of 8 are dropped" in capsys.readouterr().out
    assert sum(entry["count"] for entry in json.loads(file.read_text())["samples"]) == 8 - short
    assert main(["sizes", str(folder), "--output", str(file), *named, "--filter", f"length <= {limit}"]) == 0
    left = sum(20 <= length <= limit for length in lengths)
    assert sum(entry["count"] for entry in json.loads(file.read_text())["samples"]) == left
    assert main(["sizes", str(folder), "--output", str(file), "--transform", "lengths=9"]) != 0
    assert "was not transformed" in capsys.readouterr().err.replace("\n", " ")
