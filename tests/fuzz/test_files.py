"""Hostile files: only our own errors, within bounds of memory and time, whatever bytes a file holds."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz.files import TARGETS, Worker
from fuzz.search import Search, recorded

KINDS = (
    ("tar",),
    ("parquet", "json", "txt"),
    ("image", "image member"),
    ("index", "numeric", "tokens", "summary", "quarantine"),
)
"""Tars, sidecars, images, and indexes with what lies beside them: each has all of the seconds."""
SHARES = {target: 1 / len(kind) for kind in KINDS for target in kind}
KEPT = [pytest.param(target, path, id=f"{target}-{path.name}") for target in TARGETS for path in recorded(target)]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with closing(Worker(tmp_path_factory.mktemp("fuzz"))) as worker:
        yield worker


@pytest.mark.parametrize(("target", "path"), KEPT)
def test_kept_inputs(worker: Worker, target: str, path: Path) -> None:
    worker.attempt(target, path.read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_new_inputs(worker: Worker, target: str, tmp_path: Path, search: Search) -> None:
    share = replace(search, seconds=search.seconds * SHARES[target])
    assert share.run(target, TARGETS[target].inputs(tmp_path), lambda data: worker.attempt(target, data)) > 0
