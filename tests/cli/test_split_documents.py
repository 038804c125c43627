"""What a job, `lint` and `describe` say of documents that are split."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.jobs import module
from builders.three_encoders import three_encoders
from serving.harness import index, job_data
from shards import write_interleaved
from video.heard import write_heard

from dataserver.cli.describe import describe
from dataserver.cli.jobs import DataFlags, open_job
from dataserver.cli.lint import lint
from dataserver.dataset import Dataset
from dataserver.jobs import Rules, statistics_cache
from dataserver.planning.stream.samples import AUDIO, ROW_BITS, VIDEO
from dataserver.planning.stream.statistics import ShardStatistics


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_interleaved(tmp_path_factory.mktemp("d"), 12, 6))


def write_job(file: Path, **documents: int) -> Path:
    fields = {
        "modules": [module("encoder"), module("backbone")],
        "datasets": [{"name": "d", "documents": documents}, {"name": "elsewhere"}],
        "generation": {"ratio": "0"},
        "sizing": {"max_patches": 64},
        "seq_len": 96,
    }
    file.write_text(json.dumps(job_data(**fields)))
    return file


def test_documents_that_a_job_splits_are_counted_and_listed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path / "job.json", max_images=2)
    with pytest.raises(SystemExit):
        lint(folder, job=job, json=True)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {f["kind"] for f in findings} == {"split_document"}
    assert {f["effect"] for f in findings} == {"served"}
    parts = {f["key"]: int(f["detail"].split()[0]) for f in findings}
    keys = {key for shard in Dataset.open(folder).shards for key in [*shard.keys()]}
    assert parts.keys() <= keys
    assert min(parts.values()) > 1
    describe(folder, job=job)
    assert f"split_document  {len(parts)}  served" in capsys.readouterr().out
    data = json.loads(job.read_text())
    data["stream"]["datasets"] = data["stream"]["datasets"][:1]
    job.write_text(json.dumps(data))
    planner = open_job(job, DataFlags(dataset=(f"d={folder}",)))
    total = len(keys) - len(parts) + sum(parts.values())
    assert planner.notes == [
        f"dataset 'd': 12 documents are served as {total} parts, since those of more than 96 tokens or 2 images are "
        "split; dataserver lint --job lists them"
    ]
    served = Counter(int(n) for step in range(planner.num_steps) for n in planner.samples(step).parts[:, 1])
    assert sum(served.values()) >= total - 8, "but for a last step that is not full"


def test_a_job_that_splits_nothing_says_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path / "job.json")
    data = json.loads(job.read_text())
    data["stream"] |= {"seq_len": 65_536, "datasets": [{"name": "d", "documents": {}}]}
    job.write_text(json.dumps(data))
    lint(folder, job=job)
    assert "split_document" not in capsys.readouterr().out
    assert open_job(job, DataFlags(dataset=(f"d={folder}",))).notes == []


def test_with_a_filter_documents_are_not_counted_by_a_second_pass(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, computed, compute = write_job(tmp_path / "job.json", max_images=2), [], statistics_cache.compute_statistics

    def counted(shards: Any, rules: Rules, *more: Any) -> list[ShardStatistics]:
        computed.append(rules.split)
        return compute(shards, rules, *more)

    monkeypatch.setattr(statistics_cache, "compute_statistics", counted)
    data = json.loads(job.read_text())
    entry = data["stream"]["datasets"][0]
    data["stream"]["datasets"] = [{**entry, "filter": "width is null or width > 0"}]
    job.write_text(json.dumps(data))
    assert open_job(job, DataFlags(dataset=(f"d={folder}",))).notes == []
    assert None not in computed
    assert len(computed) == 1


def test_a_job_of_another_tokenizer_is_described_without_its_splits(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path / "job.json", max_images=2)
    data = json.loads(job.read_text())
    data["stream"] |= {"tokenizer": {"name": "gpt2"}}
    data["stream"]["datasets"][0]["filter"] = "width < 0"
    job.write_text(json.dumps(data))
    describe(folder, job=job)
    said = capsys.readouterr().out
    assert "What the filter drops" in said
    assert "split_document" not in said
    assert "not counted: its tokenizer is 'gpt2', and --tokenizer gives 'bytes'" in said
    with pytest.raises(ValueError, match=r"has tokenizer 'gpt2', which is not given; add --tokenizer gpt2=FILE$"):
        lint(folder, job=job)


@pytest.mark.parametrize("rule", ["items", "videos"])
def test_a_video_and_its_sound_are_parted_only_where_the_rule_permits_it(rule: str, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra video is not installed")
    pytest.importorskip("soundfile", reason="the extra audio is not installed")
    folder, job = write_heard(tmp_path / "heard", 24), tmp_path / "job.json"
    documents = {"name": "d", "documents": {"split": rule}}
    job.write_text(json.dumps(job_data(**three_encoders(), datasets=[documents], seq_len=48)))
    planner = open_job(job, DataFlags(dataset=(f"d={folder}",)))
    (note,) = planner.notes
    assert ("may part a video from its sound, which documents.split videos keeps" in note) == (rule == "items")
    sizes = Dataset.open(folder).shards[0].sizes()
    assert sizes.image_modality is not None
    parted = clips = 0
    for step in range(planner.num_steps):
        samples = planner.samples(step)
        assert samples.parts is not None
        ends = samples.parts[:, 3] + np.diff(samples.image_offsets)
        for row, end in zip((samples.sample & ((1 << ROW_BITS) - 1)).tolist(), ends.tolist(), strict=True):
            first, behind = sizes.image_offsets[row : row + 2].tolist()
            around = sizes.image_modality[first:behind][max(0, end - 1) : end + 1].tolist()
            parted += around == [VIDEO, AUDIO]
        clips += int((samples.image_modality == AUDIO).sum())
    assert clips > 20
    assert (parted > 0) == (rule == "items")
