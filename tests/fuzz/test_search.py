"""The search itself: it ends, a seed tries the same again, and what it finds is small, and is kept."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz.odd_bytes import MAX_BYTES, harmed
from fuzz.search import Search

FILES = [b"one", bytes(range(256)) * 100]


def tried(seed: int, folder: Path) -> list[bytes]:
    """What a search tries first."""
    inputs: list[bytes] = []

    def attempt(data: bytes) -> None:
        inputs.append(data)
        if len(inputs) == 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Search(600, seed, corpus=folder).run("target", harmed(FILES), attempt)
    return inputs


def test_a_seed_tries_the_same_inputs_and_none_grows_without_bound(tmp_path: Path) -> None:
    assert tried(1, tmp_path) == tried(1, tmp_path) != tried(2, tmp_path)
    assert max(map(len, tried(1, tmp_path))) <= MAX_BYTES


def test_the_time_ends(tmp_path: Path) -> None:
    assert Search(0, 0, corpus=tmp_path).run("target", harmed(FILES), lambda _: None) == 1


def test_the_smallest_input_that_fails_is_kept_and_tried_again_by_what_is_printed(tmp_path: Path) -> None:
    def attempt(data: bytes) -> None:
        assert data.count(b"\xff") < 2, "too many"

    search, inputs = Search(600, 0, corpus=tmp_path), harmed([bytes(1000)])
    with pytest.raises(AssertionError, match="too many") as found:
        search.run("target", inputs, attempt)
    (kept,) = (tmp_path / "target").iterdir()
    assert kept.read_bytes().count(b"\xff") == 2
    notes = "\n".join(found.value.__notes__)
    assert f"kept as {kept}" in notes
    kept.unlink()
    blob = re.search(r"b'([\w+/=-]+)'\) as a decorator", notes)
    assert blob is not None
    with pytest.raises(AssertionError, match="too many"):
        replace(search, seconds=0, blob=blob[1]).run("target", inputs, attempt)
    assert kept.exists()
