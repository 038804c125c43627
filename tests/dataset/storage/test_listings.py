"""Prefixes of very many objects: each is listed once, in bounded memory, and what is wrong is said in one line."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.server_process import command
from dataset.storage.listings import PAGE, Listed, bucket_of
from stores import AWS

from dataserver.dataset import DatasetError
from dataserver.dataset.shards import listing
from dataserver.dataset.shards.listing import find_shards
from dataserver.dataset.storage import remote

URL = Path("s3://bucket/many")
MANY = 25_000
"""More than two chunks of a listing."""
BESIDE = 2
"""Requests that only ask whether there is anything."""
SPARE_KIB = 96 << 10
"""What a million objects may take beside those that a store remembers anyway."""


@pytest.fixture
def endpoint(no_stores: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@contextmanager
def bucket(endpoint: pytest.MonkeyPatch, listed: Listed) -> Iterator[None]:
    with bucket_of(listed) as address:
        endpoint.setenv("AWS_ENDPOINT_URL", address)
        yield


def test_each_page_is_asked_for_once(endpoint: pytest.MonkeyPatch) -> None:
    listed = Listed(MANY, ".tar")
    with bucket(endpoint, listed):
        found = find_shards(URL)
    assert [found[number].name for number in (0, -1)] == ["00000000.tar", f"{MANY - 1:08}.tar"]
    assert len(found) == MANY
    assert all(shard.listed for shard in found)
    assert len(listed.asked) <= MANY // PAGE + BESIDE


def test_a_listing_goes_on_where_the_store_failed(endpoint: pytest.MonkeyPatch) -> None:
    listed = Listed(MANY, ".tar", fails=frozenset({4, 17, 18}))
    with bucket(endpoint, listed):
        found = find_shards(URL)
    assert [shard.name for shard in found] == [f"{number:08}.tar" for number in range(MANY)]
    again = 3 * remote.CHUNK // PAGE
    assert MANY // PAGE < len(listed.asked) <= MANY // PAGE + BESIDE + again


def test_a_listing_in_circles_ends(endpoint: pytest.MonkeyPatch) -> None:
    says = r"lists many/00000000\.tar again and again: its listing never ends"
    with bucket(endpoint, Listed(MANY, ".tar", in_circles=True)), pytest.raises(DatasetError, match=says):
        find_shards(URL)


def test_images_in_objects_of_their_own_are_one_clear_error(endpoint: pytest.MonkeyPatch) -> None:
    listed = Listed(MANY, ".jpg")
    says = "loose images are read from disks alone"
    with bucket(endpoint, listed), pytest.raises(DatasetError, match=says) as caught:
        find_shards(URL)
    assert len(str(caught.value)) < 500
    assert len(listed.asked) <= MANY // PAGE + BESIDE


def test_more_shards_than_a_dataset_may_have_end_the_listing(endpoint: pytest.MonkeyPatch) -> None:
    endpoint.setattr(listing, "MAX_SHARDS", MANY)
    listed = Listed(40 * MANY, ".tar")
    says = f"more than {MANY} shards below s3://bucket/many; split the dataset"
    with bucket(endpoint, listed), pytest.raises(DatasetError, match=says):
        find_shards(URL)
    assert len(listed.asked) <= 2 * MANY // PAGE


def refusal(number: int, suffix: str, endpoint: pytest.MonkeyPatch, folder: Path) -> tuple[str, int]:
    """What `dataserver index` says of so many objects, and the most memory that it took, in KiB."""
    with bucket(endpoint, Listed(number, suffix)):
        log = folder / f"{number}.log"
        with log.open("wb") as errors:
            words = command("index", str(URL), "--index-dir", folder / "index")
            process = subprocess.Popen(words, stdout=errors, stderr=errors)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 2, log.read_text()
    return log.read_text(), usage.ru_maxrss


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suffix", [".jpg", ".txt"])
def test_a_million_objects_are_refused_in_the_memory_of_a_few(
    endpoint: pytest.MonkeyPatch, tmp_path: Path, suffix: str
) -> None:
    few, memory_of_few = refusal(1000, suffix, endpoint, tmp_path)
    many, memory_of_many = refusal(1_000_000, suffix, endpoint, tmp_path)
    lines = [text.splitlines()[-1] for text in (few, many)]
    assert lines[0] == lines[1]
    assert "Traceback" not in many
    assert memory_of_many - memory_of_few < SPARE_KIB
