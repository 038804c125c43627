"""What `lint`, `bench`, `doctor` and `serve` do with transforms of users."""

import json
import re
from pathlib import Path

import pytest
from disttrain.v1.data_service_pb2 import TransformInfo
from reporting.test_fleet_checks import fleet
from serving.harness import index
from shards import write_pairs

from dataserver.cli import main
from dataserver.reporting.fleet_checks import check, summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("shards") / "pairs", 4, 2))


@pytest.mark.long
def test_lint_finds_transforms_that_fail_or_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`counts` has a state, `once` takes chance from its process, `drifts` from the clock."""
    flags = ["tint=1.2.0", "counts=1.2.0", "raises=1.2.0", "shout=3.1", "once=3.1", "lengths=0.4", "drifts=0.4"]
    pairs = [word for flag in flags for word in ("--verify-transforms", flag)]
    with pytest.raises(SystemExit):
        main(["lint", str(folder), "--json", *pairs])
    report = json.loads(capsys.readouterr().out)
    found = {(entry["kind"], re.findall(r"\w+=[\d.]+", entry["detail"])[0]) for entry in report["findings"]}
    assert found == {
        ("transform", "raises=1.2.0"),
        ("transform", "counts=1.2.0"),
        ("text_transform", "once=3.1"),
        ("transform", "drifts=0.4"),
    }
    assert report["counts"] == {"text_transform": 4, "transform": 10}
    assert report["quarantine"]["samples"] == 0
    assert main(["lint", str(folder), "--verify-transforms", "tint=1.2.0"]) == 0


def test_lint_lists_transforms_that_die_beside_its_other_findings(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for flag in ("dies=1.2.0", "fewer=0.4") for word in ("--verify-transforms", flag)]
    with pytest.raises(SystemExit):
        main(["lint", str(folder), "--json", *flags])
    details = [entry["detail"] for entry in json.loads(capsys.readouterr().out)["findings"]]
    assert len(details) == 2
    assert "the process of the transform dies=1.2.0 died" in details[0]
    assert "fewer=0.4 failed: it returned a table of 1 rows" in details[1]


def test_bench_says_in_a_line_that_a_transform_died(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-patches", "64", "--threads", "1", "--samples", "1", "--transform", "dies=1.2.0"]
    assert main(["bench", str(folder), *flags]) == 2
    assert "dies=1.2.0 died" in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_bench_shows_what_transforms_cost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-patches", "64", "--threads", "1", "--transform", 'tint=1.2.0:{"most":9}']
    assert main(["bench", str(folder), *flags]) == 0
    said = " ".join(capsys.readouterr().out.split())
    figures = re.search(r"CPU time of an image: ([\d.]+) ms without the transforms, ([\d.]+) ms with them", said)
    assert figures is not None
    assert float(figures[1]) < float(figures[2])


def test_the_doctor_finds_servers_with_other_versions() -> None:
    servers = fleet(3)
    for one, version in zip(servers, ("1.2.0", "1.2.0", "1.3.0"), strict=True):
        one.info.transforms.append(TransformInfo(name="tint", version=version))
    assert [found.what for found in check(servers, 0) if "tint" in found.what] == [
        "transform tint version 1.2.0",
        "transform tint version 1.3.0",
    ]
    assert summary(servers, {}).endswith("; transforms tint=1.2.0, tint=1.3.0")


def test_servers_start_only_with_transforms_that_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for transform, message in (
        ("tint=1.0", "is installed in version 1.2.0, and 1.0 is named"),
        ("shout=3.1", "texts and metadata by dataserver index"),
        ("tint", "NAME=VERSION is required"),
    ):
        assert main(["serve", "--dataset", f"d={folder}", "--transform", transform]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
