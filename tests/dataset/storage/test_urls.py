"""URLs as paths: what they keep of themselves, and what is refused before anything is asked."""

import pickle
from pathlib import Path, PurePath

import pytest

from dataserver.cli import main
from dataserver.dataset import DatasetError
from dataserver.dataset.storage.urls import Url, as_url, expanded, location


@pytest.mark.parametrize(
    ("text", "store", "key"),
    [
        ("s3://bucket/laion/2b", "bucket", "laion/2b"),
        ("s3://bucket", "bucket", ""),
        ("gs://bucket/a", "bucket", "a"),
        ("az://account/container/a/b", "account/container", "a/b"),
        ("https://host:8080/a", "host:8080", "a"),
        ("HTTP://host/a", "host", "a"),
        ("hf://datasets/ORG/NAME@v1/data", "datasets/ORG/NAME@v1", "data"),
    ],
)
def test_a_url_is_a_path_that_keeps_its_slashes(text: str, store: str, key: str) -> None:
    url = location(Path(text))
    assert isinstance(url, Url)
    assert (url.store, url.key) == (store, key)
    assert str(url) == f"{url}" == text[:5].lower() + text[5:]
    below = url / "00000.tar"
    assert (str(below), below.name, below.parent) == (f"{url}/00000.tar", "00000.tar", url)
    assert pickle.loads(pickle.dumps(below)) == below
    assert as_url(PurePath(str(below))) == below


@pytest.mark.parametrize("text", ["/data/laion", "relative", "s3/bucket", "other://bucket", "c:/x"])
def test_other_paths_stay_as_they_are(text: str) -> None:
    path = Path(text)
    assert location(path) is path


SECRETS = (
    "s3://AKIA:hunter2@bucket/x",
    "https://user:hunter2@host/x.tar",
    "https://host/x.tar?X-Amz-Signature=hunter2",
    "az://account/container/x?sig=hunter2",
    "hf://hunter2@datasets/ORG/NAME",
)


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("command", ["index", "lint", "describe", "sizes", "bench"])
def test_a_url_with_a_secret_is_refused_and_not_repeated(
    text: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, text, *(["--output", "x"] if command == "sizes" else [])]) == 2
    captured = capsys.readouterr()
    assert "leave it out" in captured.err
    assert "hunter2" not in captured.err + captured.out


@pytest.mark.parametrize("text", SECRETS)
@pytest.mark.parametrize("entry", ["{}", "a={}"])
def test_a_server_repeats_no_secret(text: str, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dataset", entry.format(text)]) == 2
    captured = capsys.readouterr()
    assert "hunter2" not in captured.err + captured.out


@pytest.mark.parametrize("text", ["s3://", "az://account", "hf://datasets/ORG", "s3://bucket/../other"])
def test_a_url_without_a_dataset_is_refused(text: str) -> None:
    if as_url(Path(text)) is not None:
        with pytest.raises(DatasetError, match="names no dataset"):
            location(Path(text))


def test_braces_stand_for_files() -> None:
    found = expanded(location(Path("https://host/a/{08..10}/{0..1}.tar")))
    assert found == (Url("https:/host/a"), ["08/0.tar", "08/1.tar", "09/0.tar", "09/1.tar", "10/0.tar", "10/1.tar"])
    assert expanded(location(Path("s3://bucket/a"))) is None
    assert expanded(Path("/data/{0..1}.tar")) is None
    for wrong in ("{3..1}", "{0..9999999999}", "{000..999}{000..999}{00..99}"):
        with pytest.raises(DatasetError, match=r"more than 1048576 files|no files"):
            expanded(location(Path(f"https://host/{wrong}.tar")))
    with pytest.raises(DatasetError, match="twice"):
        expanded(location(Path("https://host/{1..11}{1..11}.tar")))
