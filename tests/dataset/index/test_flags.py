"""The command that messages name: with the flags of the index, as a shell takes it."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shards import write_tar

from dataserver.cli import index as index_command_line
from dataserver.cli import main
from dataserver.dataset import (
    CaptionSource,
    Dataset,
    DatasetError,
    IndexRules,
    KeyEnd,
    MetadataKeys,
    OnTokenError,
    SeveralImages,
    StaleIndexError,
    TextOnly,
    TruncatedImages,
    build_index,
    parse_captions,
)
from dataserver.dataset.index.flags import FLAGS_NAME, command_of, flags_of, index_command
from dataserver.dataset.shards.listing import ShardFile

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,8}", fullmatch=True).filter(lambda name: name != "own")
WORDS = st.text(st.characters(exclude_categories=["C"], exclude_characters="/:"), min_size=1, max_size=8)
SOURCES = st.dictionaries(NAMES, st.tuples(st.sampled_from(["json", "parquet", "re.json"]), WORDS), max_size=3)
FOLDERS = st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="/."), min_size=1, max_size=8)


def write_texts(path: Path, texts: dict[str, str]) -> None:
    write_tar(path, [(f"{key}.txt", text.encode()) for key, text in texts.items()])


@st.composite
def rules(draw: st.DrawFn) -> IndexRules:
    captions = tuple(CaptionSource(name, *source) for name, source in sorted(draw(SOURCES).items()))
    return IndexRules(
        draw(st.sampled_from(TextOnly)),
        draw(st.sampled_from(MetadataKeys)),
        draw(st.booleans()),
        draw(st.sampled_from(OnTokenError)),
        draw(st.sampled_from(TruncatedImages)),
        draw(st.sampled_from(KeyEnd)),
        draw(st.sampled_from(SeveralImages)),
        captions,
        tuple(Path("/joins") / name for name in draw(st.lists(FOLDERS, max_size=2, unique=True))),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chosen=rules(), root=FOLDERS)
def test_the_command_gives_the_rules_whatever_their_names_hold(
    chosen: IndexRules, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Path, IndexRules]] = []

    def remember(
        path: Path, index_dir: Path, workers: None, _tokenizers: object, asked: IndexRules, *_: object
    ) -> None:
        assert (index_dir, workers) == (Path("/in dex"), None)
        found.append((path, asked))

    monkeypatch.setattr(index_command_line, "_index_one", remember)
    folder = Path("/data") / root
    command = command_of(ShardFile("0.tar", folder, Path("/in dex")), flags_of(chosen))
    program, *arguments = shlex.split(command)
    assert program == "dataserver"
    main(arguments)
    assert found == [(folder, chosen)]


def indexed_by(folder: Path, captions: Sequence[str] = (), joins: tuple[Path, ...] = ()) -> ShardFile:
    build_index(folder, workers=1, rules=IndexRules(captions=parse_captions(captions), joins=joins))
    return ShardFile("0.tar", folder, None)


def test_messages_name_the_flags_that_the_dataset_was_indexed_with(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_texts(folder / "0.tar", {"a": "words"})
    shard = indexed_by(folder, ["c=txt"])
    command = f"dataserver index {folder} --caption c=txt"
    assert index_command(shard) == command
    write_texts(folder / "1.tar", {"b": "others"})
    with pytest.raises(StaleIndexError, match=rf"1\.tar: it has no index .*; run: {command}"):
        Dataset.open(folder)
    with pytest.raises(DatasetError, match="no sample of"):
        indexed_by(folder, ["typo=text"])
    assert index_command(shard) == command, "flags that were refused are none to index with"
    indexed_by(folder)
    assert index_command(shard) == f"dataserver index {folder}"
    assert not (folder / FLAGS_NAME).exists()


@pytest.mark.parametrize("content", [b"", b"[", b"[1]", b'{"a": 1}', b'["--caption", "a\\nb=txt"]', b"[" * 100_000])
def test_damaged_flags_are_no_flags(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FLAGS_NAME).write_bytes(content)
    assert index_command(ShardFile("0.tar", tmp_path, None)) == f"dataserver index {tmp_path}"


def test_that_flags_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_texts(tmp_path / "0.tar", {"a": "words"})
    (tmp_path / FLAGS_NAME).mkdir()
    with caplog.at_level(logging.WARNING):
        indexed_by(tmp_path, ["c=txt"])
    assert "messages that say how to index the dataset again name no flags" in caplog.text
