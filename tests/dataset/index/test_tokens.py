"""Token counts beside the index: order, freshness, and the command that a missing count names."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from shards import write_interleaved, write_tar, write_texts

from dataserver.dataset import (
    Dataset,
    DatasetError,
    ShardReadError,
    TokensMissingError,
    build_index,
    count_tokens,
    index_caches,
)
from dataserver.dataset.index.format import BATCH_ROWS, IndexHeader
from dataserver.dataset.index.tokens import TokenCounts, read_counts
from dataserver.dataset.shards.listing import ShardFile


class Tokenizer(NamedTuple):
    """Stands for one that `index` was given."""

    digest: str
    encode_all: Callable[[list[str]], Sequence[np.ndarray]]
    vocab_size: int = 256
    name: str = "test"


def byte_ids(texts: list[str]) -> Sequence[np.ndarray]:
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def word_ids(texts: list[str]) -> Sequence[np.ndarray]:
    """The length of each word, with a large number added that only wide ids hold."""
    return [np.array([99_000 + len(word) for word in text.split()], np.int32) for text in texts]


def counts_of(ids: Sequence[np.ndarray]) -> list[int]:
    return [len(found) for found in ids]


BYTES, WORDS = Tokenizer("bytes", byte_ids), Tokenizer("words", word_ids, 1 << 17)


def test_counts_of_two_tokenizers(tmp_path: Path) -> None:
    folder = write_interleaved(tmp_path, 12, 4)
    build_index(folder, workers=1)
    report = count_tokens(folder, BYTES)
    assert (report.num_shards, report.num_counted) == (3, 3)
    count_tokens(folder, WORDS)
    total = 0
    for shard in Dataset.open(folder).shards:
        texts = [text for row in range(shard.num_samples) for text in shard.parts(row).texts]
        counts = shard.tokens.counts("bytes")
        assert counts.dtype == np.int32
        assert counts.tolist() == shard.sizes().text_bytes.tolist() == counts_of(byte_ids(texts))
        assert shard.tokens.counts("words").tolist() == counts_of(word_ids(texts))
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
        Dataset.open(folder, indexes).shards[0].tokens.counts("abc")
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
        Dataset.open(tmp_path).shards[0].tokens.counts("words")
    assert count_tokens(tmp_path, WORDS).num_tokens == 3
    tokens = next(tmp_path.glob("*.tokens-*"))
    tokens.write_bytes(tokens.read_bytes()[:60])
    with pytest.raises(TokensMissingError, match="cannot be read"):
        Dataset.open(tmp_path).shards[0].tokens.counts("words")


@pytest.mark.parametrize("counts", [[1.5], [float("nan")], [None], [-2], ["1"]])
def test_counts_that_are_none_are_missing_ones(tmp_path: Path, counts: list[object]) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"x")])
    build_index(tmp_path, workers=1)
    count_tokens(tmp_path, BYTES)
    (path,) = tmp_path.glob("*.tokens-*")
    metadata = pa.ipc.open_file(path.read_bytes()).schema.metadata
    typed = pa.array(counts, pa.int32()) if counts in ([None], [-2]) else pa.array(counts)
    table = pa.table({"tokens": typed}).replace_schema_metadata(metadata)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(TokensMissingError, match="cannot be read"):
        Dataset.open(tmp_path).shards[0].tokens.counts(BYTES.digest)
    assert count_tokens(tmp_path, BYTES).num_counted == 1


def test_batches_are_bounded(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 1
    folder = write_texts(tmp_path, count, count)
    build_index(folder, workers=1)
    lengths: list[int] = []

    def encode(texts: list[str]) -> Sequence[np.ndarray]:
        lengths.append(len(texts))
        return byte_ids(texts)

    count_tokens(folder, Tokenizer("bytes", encode))
    assert lengths == [BATCH_ROWS, BATCH_ROWS, 1]


@pytest.mark.parametrize("answer", [[[1]], [[-1], [1], [1]], [[1], [1], [256]]])
def test_a_tokenizer_that_breaks_its_contract(tmp_path: Path, answer: list[list[int]]) -> None:
    folder = write_texts(tmp_path, 3, 3)
    build_index(folder, workers=1)
    with pytest.raises(DatasetError, match="the tokenizer gave"):
        count_tokens(folder, Tokenizer("broken", lambda _: [np.array(ids, np.int32) for ids in answer]))
    assert not list(folder.glob("*.tokens-*"))
    assert not list(folder.glob("*.ids-*"))


@pytest.mark.parametrize(("vocab_size", "size"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4), (1 << 31, 4)])
def test_ids_take_the_bytes_that_their_vocabulary_needs(tmp_path: Path, vocab_size: int, size: int) -> None:
    write_tar(tmp_path / "0.tar", [("0.txt", b"ab"), ("1.txt", b"c"), ("2.txt", b"def")])
    build_index(tmp_path, workers=1)
    largest = vocab_size - 1
    tokenizer = Tokenizer("t", lambda texts: [np.full(len(text), largest, np.int32) for text in texts], vocab_size)
    count_tokens(tmp_path, tokenizer)
    assert next(tmp_path.glob("*.ids-*")).stat().st_size == 6 * size
    shard = Dataset.open(tmp_path).shards[0]
    found = [shard.document(row, "t").texts[0] for row in range(3)]
    assert [ids.tolist() for ids in found] == [[largest] * 2, [largest], [largest] * 3]
    assert all(ids.dtype == np.int32 for ids in found)


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS])
def test_documents_have_the_ids_of_their_texts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_interleaved(tmp_path, 12, 5)
    build_index(folder, workers=1)
    count_tokens(folder, tokenizer)
    for shard in Dataset.open(folder).shards:
        for row in range(shard.num_samples):
            parts, document = shard.parts(row), shard.document(row, tokenizer.digest)
            assert document.kinds == parts.kinds
            expected = tokenizer.encode_all(list(parts.texts))
            assert [ids.tolist() for ids in document.texts] == [ids.tolist() for ids in expected]


def ids_of_one_shard(folder: Path) -> Path:
    write_tar(folder / "0.tar", [("0.txt", b"one two"), ("1.txt", b"three")])
    build_index(folder, workers=1)
    count_tokens(folder, BYTES)
    return next(folder.glob("*.ids-*"))


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b"x" + b[1:], lambda _: b""])
def test_ids_that_are_not_those_that_were_counted_are_noticed(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = ids_of_one_shard(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    shard = Dataset.open(tmp_path).shards[0]
    with pytest.raises(TokensMissingError, match=r"are not those that were counted; remove the shard's .tokens files"):
        shard.document(0, BYTES.digest)
    assert shard.tokens.counts(BYTES.digest).tolist() == [7, 5]


def test_ids_that_are_gone_are_made_again(tmp_path: Path) -> None:
    path = ids_of_one_shard(tmp_path)
    before = path.read_bytes()
    path.unlink()
    with pytest.raises(TokensMissingError, match=r"token ids .* are not there"):
        Dataset.open(tmp_path).shards[0].document(0, BYTES.digest)
    assert count_tokens(tmp_path, BYTES).num_counted == 1
    assert path.read_bytes() == before
    assert count_tokens(tmp_path, BYTES).num_counted == 0


def test_ids_that_are_cut_while_they_are_read_are_trouble_of_the_storage(tmp_path: Path) -> None:
    path = ids_of_one_shard(tmp_path)
    shard = Dataset.open(tmp_path).shards[0]
    assert bytes(shard.document(1, BYTES.digest).texts[0].tolist()) == b"three"
    with path.open("r+b") as file:
        file.truncate(9)
    with pytest.raises(ShardReadError, match="gave 2 of 5 bytes; was it cut"):
        shard.document(1, BYTES.digest)
    assert bytes(shard.document(0, BYTES.digest).texts[0].tolist()) == b"one two"


def test_few_files_of_ids_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_caches, "MAX_OPEN_TOKEN_IDS", 2)
    folder = write_texts(tmp_path, 10, 2)
    build_index(folder, workers=1)
    count_tokens(folder, BYTES)
    shards = Dataset.open(folder).shards
    for shard in shards:
        assert shard.document(0, BYTES.digest).texts
    gc.collect()
    files = (Path(f"/proc/self/fd/{number}").resolve() for number in range(256))
    held = sorted(file.name for file in files if file.parent == folder.resolve() and ".ids-" in file.name)
    assert [name.split(".")[0] for name in held] == ["00003", "00004"]
    assert len(shards) == 5


def test_counts_are_read_once_for_planning_and_for_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But again where the ids are not those that were counted, since both are made again then."""
    path = ids_of_one_shard(tmp_path)
    right, read = path.read_bytes(), list[str]()

    def counted(shard: ShardFile, header: IndexHeader, digest: str) -> TokenCounts:
        read.append(digest)
        return read_counts(shard, header, digest)

    monkeypatch.setattr("dataserver.dataset.shard_tokens.read_counts", counted)

    def count_again(tokenizer: Tokenizer) -> None:
        for file in tmp_path.glob("*.tokens-*"):
            file.unlink()
        count_tokens(tmp_path, tokenizer)
        path.write_bytes(right)

    count_again(Tokenizer(BYTES.digest, lambda texts: [ids + 1 for ids in byte_ids(texts)]))
    shard = Dataset.open(tmp_path).shards[0]
    assert shard.tokens.counts(BYTES.digest).tolist() == [7, 5]
    with pytest.raises(TokensMissingError, match="are not those that were counted"):
        shard.document(0, BYTES.digest)
    assert len(read) == 1
    count_again(BYTES)
    assert shard.tokens.counts(BYTES.digest).tolist() == [7, 5]
    assert bytes(shard.document(1, BYTES.digest).texts[0].tolist()) == b"three"
    assert len(read) == 2


def test_texts_without_a_token(tmp_path: Path) -> None:
    """As tokenizers give that drop what they do not know."""
    short = Tokenizer("short", lambda texts: [ids[ids < 99_005] for ids in word_ids(texts)], 1 << 17)
    write_tar(tmp_path / "0.tar", [("0.txt", b"unknown"), ("1.txt", b"one two"), ("2.txt", b"unheard-of")])
    build_index(tmp_path, workers=1)
    assert count_tokens(tmp_path, short).num_tokens == 2
    assert count_tokens(tmp_path, short).num_counted == 0
    shard = Dataset.open(tmp_path).shards[0]
    assert shard.tokens.counts("short").tolist() == [0, 2, 0]
    found = [shard.document(row, "short").texts[0].tolist() for row in range(3)]
    assert found == [[], [99_003, 99_003], []]
