"""Texts that a tokenizer cannot encode: an error that names the sample, or a finding by a rule of the index."""

import json
from pathlib import Path

import pytest
from shards import write_tar
from tokenizers import Tokenizer, models, pre_tokenizers

from dataserver.assembly import load_tokenizer
from dataserver.assembly.tokens import Tokenizer as TokenizerProtocol
from dataserver.cli import main
from dataserver.dataset import Dataset, DatasetError, IndexRules, OnTokenError, build_index, count_tokens, lint
from dataserver.jobs.shard_statistics import Rules, compute_statistics, rows_left
from dataserver.planning.job.fields import Sizing

SKIP = IndexRules(on_token_error=OnTokenError.SKIP)


@pytest.fixture
def words(tmp_path: Path) -> TokenizerProtocol:
    """Knows two words and has nothing for any other."""
    path = tmp_path / "words.json"
    model = Tokenizer(models.WordLevel({"a": 0, "red": 1}))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(path))
    return load_tokenizer("words", path)


def texts(folder: Path) -> Path:
    members = [("0.txt", b"a red"), ("1.txt", b"a green car"), ("2.txt", b"red"), ("3.txt", b"blue")]
    members += [(f"k{n}.txt", b"a") for n in range(300)]
    folder.mkdir()
    write_tar(folder / "0.tar", members)
    write_tar(folder / "1.tar", [("0.txt", b"a")])
    return folder


def test_the_first_one_is_named(tmp_path: Path, words: TokenizerProtocol) -> None:
    folder = texts(tmp_path / "d")
    build_index(folder, workers=1)
    with pytest.raises(DatasetError) as raised:
        count_tokens(folder, words)
    message = str(raised.value)
    assert f"shard {folder / '0.tar'}, sample '1': tokenizer words cannot encode its text (" in message
    assert "Missing [UNK] token" in message
    assert "index with --on-token-error skip" in message
    assert message.isprintable()
    assert not list(folder.glob("*.tokens-*"))


def test_they_are_findings_where_the_rules_say_so(tmp_path: Path, words: TokenizerProtocol) -> None:
    folder = texts(tmp_path / "d")
    build_index(folder, workers=1, rules=SKIP)
    report = count_tokens(folder, words)
    assert (report.num_counted, report.num_failed, report.num_texts, report.num_tokens) == (2, 2, 305, 304)
    again = count_tokens(folder, words)
    assert (again.num_counted, again.num_failed) == (0, 2)
    bytes_ = load_tokenizer("bytes")
    assert count_tokens(folder, bytes_).num_failed == 0
    dataset = Dataset.open(folder)
    shard = dataset.shards[0]
    left = [0, 2, *range(4, 304)]
    assert rows_left(shard, None, Rules(words.digest, Sizing())).tolist() == left
    assert rows_left(shard, None, Rules(bytes_.digest, Sizing())).tolist() == list(range(304))
    assert [shard.document(row, words.digest).texts[0].tolist() for row in left[:3]] == [[0, 1], [1], [0]]
    statistics = compute_statistics(dataset.shards, Rules(words.digest, Sizing()), workers=1)
    assert [n for found in statistics for n in found.samples.tolist()] == [302, 1]
    report = lint(folder, quarantine_file=tmp_path / "q.jsonl")
    assert report.counts == {"token_error": 2}
    assert [(f.shard, f.key, f.kind) for f in report.findings] == [("0.tar", k, "token_error") for k in "13"]
    assert report.quarantine.num_samples == 0  # other tokenizers can encode them


def test_the_rule_is_part_of_the_fingerprint(tmp_path: Path, words: TokenizerProtocol) -> None:
    folder = texts(tmp_path / "d")
    build_index(folder, workers=1)
    before = Dataset.open(folder).fingerprint
    build_index(folder, workers=1, rules=SKIP)
    assert Dataset.open(folder).fingerprint != before


def test_the_command_says_how_many(
    tmp_path: Path, words: TokenizerProtocol, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = texts(tmp_path / "d")
    flags = ["index", str(folder), "--workers", "1", "--tokenizer", f"words={tmp_path / 'words.json'}"]
    assert main(flags) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("dataserver: ")
    assert "sample '1': tokenizer words cannot encode" in error
    assert main([*flags, "--on-token-error", "skip"]) == 0
    assert "left out     2 token_error (words)" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="1"):
        main(["lint", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["counts"] == {"token_error": 2}
