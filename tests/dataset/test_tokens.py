"""Token counts beside the index: order, freshness, and the command that a missing count names."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from shards import write_interleaved, write_tar, write_texts

from dataserver.dataset import Dataset, DatasetError, TokensMissingError, build_index, count_tokens
from dataserver.dataset.index import BATCH_ROWS


class Tokenizer(NamedTuple):
    """Stands for one in the count."""

    digest: str
    count: Callable[[list[str]], Sequence[int]]


def byte_counts(texts: list[str]) -> Sequence[int]:
    return [len(text.encode()) for text in texts]


def word_counts(texts: list[str]) -> Sequence[int]:
    return [len(text.split()) for text in texts]


BYTES, WORDS = Tokenizer("bytes", byte_counts), Tokenizer("words", word_counts)


def test_counts_of_two_tokenizers(tmp_path: Path) -> None:
    folder = write_interleaved(tmp_path, 12, 4)
    build_index(folder, workers=1)
    report = count_tokens(folder, BYTES)
    assert (report.num_shards, report.num_counted) == (3, 3)
    count_tokens(folder, WORDS)
    total = 0
    for shard in Dataset.open(folder).shards:
        texts = [text for row in range(shard.num_samples) for text in shard.parts(row).texts]
        counts = shard.token_counts("bytes")
        assert counts.dtype == np.int32
        assert counts.tolist() == shard.sizes().text_bytes.tolist() == byte_counts(texts)
        assert shard.token_counts("words").tolist() == word_counts(texts)
        total += int(counts.sum())
    assert report.num_tokens == total


def test_only_missing_counts_are_made(tmp_path: Path) -> None:
    folder = write_texts(tmp_path, 9, 3)
    build_index(folder, workers=1)
    progress: list[tuple[int, int]] = []
    first = count_tokens(folder, BYTES, progress=lambda *call: progress.append(call))
    assert progress == [(0, 3), (1, 3), (2, 3), (3, 3)]
    next(folder.glob("00001.tar.tokens-*")).unlink()
    second = count_tokens(folder, BYTES)
    assert (second.num_counted, second.num_tokens, second.num_texts) == (1, first.num_tokens, 9)


def test_missing_counts_name_the_command(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "data", 3, 3)
    indexes = tmp_path / "indexes"
    build_index(folder, indexes, workers=1)
    with pytest.raises(TokensMissingError) as caught:
        Dataset.open(folder, indexes).shards[0].token_counts("abc")
    command = f"dataserver index {folder} --index-dir {indexes} --tokenizer NAME=FILE (or --tokenizer bytes)"
    assert command in str(caught.value)


def test_counts_of_other_texts_are_noticed(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"one two")])
    build_index(tmp_path, workers=1)
    count_tokens(tmp_path, WORDS)
    write_tar(tmp_path / "0.tar", [("0.txt", b"one two three")])
    (tmp_path / "0.tar.index").unlink()
    build_index(tmp_path, workers=1)
    with pytest.raises(TokensMissingError, match="another index"):
        Dataset.open(tmp_path).shards[0].token_counts("words")
    assert count_tokens(tmp_path, WORDS).num_tokens == 3
    tokens = next(tmp_path.glob("*.tokens-*"))
    tokens.write_bytes(tokens.read_bytes()[:60])
    with pytest.raises(TokensMissingError, match="cannot be read"):
        Dataset.open(tmp_path).shards[0].token_counts("words")


@pytest.mark.parametrize("counts", [[1.5], [float("nan")], [None], [-1], ["1"]])
def test_counts_that_are_none_are_missing_ones(tmp_path: Path, counts: list[object]) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"x")])
    build_index(tmp_path, workers=1)
    count_tokens(tmp_path, BYTES)
    (path,) = tmp_path.glob("*.tokens-*")
    metadata = pa.ipc.open_file(path.read_bytes()).schema.metadata
    typed = pa.array(counts, pa.int32()) if counts in ([None], [-1]) else pa.array(counts)
    table = pa.table({"tokens": typed}).replace_schema_metadata(metadata)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(TokensMissingError, match="cannot be read"):
        Dataset.open(tmp_path).shards[0].token_counts(BYTES.digest)
    assert count_tokens(tmp_path, BYTES).num_counted == 1


def test_batches_are_bounded(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 1
    folder = write_texts(tmp_path, count, count)
    build_index(folder, workers=1)
    lengths: list[int] = []

    def encode(texts: list[str]) -> Sequence[int]:
        lengths.append(len(texts))
        return byte_counts(texts)

    count_tokens(folder, Tokenizer("bytes", encode))
    assert lengths == [BATCH_ROWS, BATCH_ROWS, 1]


@pytest.mark.parametrize("answer", [[1], [-1, 1, 1], [1, 1, 1 << 31]])
def test_a_tokenizer_that_breaks_its_contract(tmp_path: Path, answer: list[int]) -> None:
    folder = write_texts(tmp_path, 3, 3)
    build_index(folder, workers=1)
    with pytest.raises(DatasetError, match="the tokenizer gave"):
        count_tokens(folder, Tokenizer("broken", lambda _: answer))
    assert not list(folder.glob("*.tokens-*"))
