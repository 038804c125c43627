"""Odd and hostile shards against their manifest: what index, lint and a server say of each sample."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli.server_process import run, serving
from dataset.odd_manifest import Place, said, samples
from e2e.streams import read_views
from make_odd_shards import make
from serving.harness import job_data

from dataserver.planning.job.identity import Job
from trainclient.client import DataClient
from trainclient.stream.microbatch import Items

IMAGES = {"pair": 1, "text": 0, "document": 2}
SERVED = ("served", "invalid")


@pytest.fixture(
    scope="module", params=[(1, "allow", "invalid"), (2, "leave-out", "accept")], ids=["allow", "leave-out"]
)
def odd(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Indexed shards and their manifest."""
    folder = tmp_path_factory.mktemp("odd") / "d"
    seed, text_only, truncated = request.param
    manifest = make(folder, seed, text_only == "allow", truncated == "accept")
    indexed = run("index", folder, "--text-only", text_only, "--truncated-images", truncated, "--allow-duplicates")
    assert indexed.returncode == 0, indexed.stderr
    found = [line.split() for line in indexed.stdout.splitlines()]
    counts = {line[-1]: int(line[-2]) for line in found if len(line) > 2 and line[0] in ("left", "served", "ignored")}
    expected = Counter(kind for _, _, kind in said(manifest) if kind not in ("undecodable", "truncated_image"))
    assert counts == expected
    assert ["samples", str(sum(s["verdict"] in SERVED for _, s in samples(manifest)))] in found
    return folder, manifest


def test_lint_says_what_the_manifest_says(odd: tuple[Path, dict[str, Any]]) -> None:
    folder, manifest = odd
    done = run("lint", folder, "--decode", "--json", "--quarantine-file", folder.with_name("list"))
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert Counter((f["shard"], f["key"], f["kind"]) for f in found["findings"]) == Counter(said(manifest))
    for finding in found["findings"]:
        sample = manifest["shards"].get(finding["shard"], {"samples": {}})["samples"].get(finding["key"])
        assert sample is None or finding["effect"] in (sample["verdict"], "served", "ignored", "left out")
    quarantined = [tuple(json.loads(line)) for line in folder.with_name("list").read_text().splitlines()]
    assert set(quarantined) == {place for place, sample in samples(manifest) if sample["verdict"] != "served"}


def test_a_server_delivers_what_the_manifest_says(odd: tuple[Path, dict[str, Any]]) -> None:
    """Each sample that is served or invalid exactly once, with its images; no other one."""
    folder, manifest = odd
    data = job_data(
        modules=[{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone"}],
        datasets=[{"name": "d"}],
        generation={"ratio": "0"},
        end={"epochs": 1},
    )
    data["execution"]["validity"] = "exact"
    with serving("--dataset", f"d={folder}") as server:
        with DataClient([server.address], data, "llm", 0) as client:
            job = client.job
        views = read_views([server.address], job, lambda batch: batch.items)
        places = describe(server.address, job, {n for items in views["llm", 0] for n in items.sample.tolist()})
        _, errors = server.end(signal.SIGKILL)
    assert "Traceback" not in errors
    expected = {place: sample for place, sample in samples(manifest) if sample["verdict"] in SERVED}
    assert sorted(places.values()) == sorted(expected)
    assert judged(views["llm", 0], places) == Counter(
        (place, sample["verdict"] == "served") for place, sample in expected.items()
    )
    assert judged(views["vit", 0], places) == Counter(
        (place, sample["verdict"] == "served")
        for place, sample in expected.items()
        for _ in range(IMAGES[sample["form"]])
    )


def describe(address: str, job: Job, numbers: set[int]) -> dict[int, Place]:
    with DataClient([address], job, "llm", 0) as client:
        listed = sorted(numbers)
        return {n: (s.shard, s.key) for n, s in zip(listed, client.describe_samples(0, listed), strict=True)}


def judged(views: list[Items], places: dict[int, Place]) -> Counter[tuple[Place, bool]]:
    """How often each item came, and whether as valid."""
    assert not any((~items.valid & ~items.invalid).any() for items in views)
    return Counter(
        (places[n], bool(valid))
        for items in views
        for n, valid in zip(items.sample.tolist(), items.valid.tolist(), strict=True)
    )
