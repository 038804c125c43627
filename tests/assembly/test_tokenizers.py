"""Tokenizers, and the counts that the dataset keeps of them."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shards import write_pairs
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from dataserver.assembly import hugging_face
from dataserver.assembly.hugging_face import HuggingFaceTokenizer, TokenizerError, text_batches
from dataserver.assembly.limits import MAX_TEXT_BATCH_BYTES
from dataserver.assembly.tokens import ByteTokenizer, check_tokenizer, load_tokenizer, tokenizer_spec
from dataserver.dataset import Dataset, build_index, count_tokens

CORPUS = ["the quick brown fox jumps over the lazy dog", "two cats and an old boat on the river"] * 20


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE vocabulary with two special tokens and nothing switched on."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(CORPUS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture
def loaded_file(plain_file: Path, tmp_path: Path) -> Path:
    """The same vocabulary with everything switched on that would change its output."""
    content: dict[str, Any] = json.loads(plain_file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<s>",
    }
    content["model"]["dropout"] = 0.5
    path = tmp_path / "loaded.json"
    path.write_text(json.dumps(content))
    model = Tokenizer.from_file(str(path))
    model.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", model.token_to_id("<s>")), ("</s>", model.token_to_id("</s>"))]
    )
    model.save(str(path))
    return path


@given(st.lists(st.text(max_size=50), max_size=5))
def test_bytes(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode_all(texts)
    assert [bytes(found.tolist()) for found in ids] == [text.encode() for text in texts]
    assert all(found.dtype == np.int32 for found in ids)


def test_the_identity_of_bytes_never_changes() -> None:
    spec = tokenizer_spec(load_tokenizer("bytes"))
    assert spec.digest == hashlib.sha256(b"disttrain bytes tokenizer 1").hexdigest()
    assert spec.digest == "206d303b871214b1c7b520281031ce275aa931671b1b95c80a5ab06044514ace"
    assert (spec.bos, spec.eos, spec.boi, spec.eoi, spec.image, spec.query, spec.vocab_size) == tuple(range(256, 263))


@given(st.text(max_size=200))
def test_hugging_face_agrees_with_the_library(plain_file: Path, text: str) -> None:
    reference = Tokenizer.from_file(str(plain_file))
    reference.encode_special_tokens = True
    tokenizer = HuggingFaceTokenizer("bpe", plain_file)
    expected = reference.encode(text, add_special_tokens=False).ids
    ids = tokenizer.encode_all([text, "", text])
    assert [found.tolist() for found in ids] == [expected, [], expected]
    assert all(found.dtype == np.int32 for found in ids)


def test_only_the_text_decides(plain_file: Path, loaded_file: Path) -> None:
    plain, loaded = HuggingFaceTokenizer("a", plain_file), HuggingFaceTokenizer("b", loaded_file)
    assert plain.digest == hashlib.sha256(plain_file.read_bytes()).hexdigest() != loaded.digest
    texts = ["", "the quick brown fox jumps over the lazy dog and the old boat", "caf\u00e9"]
    expected = [ids.tolist() for ids in plain.encode_all(texts)]
    for _ in range(20):
        assert [ids.tolist() for ids in loaded.encode_all(texts)] == expected


def test_text_that_looks_like_a_special_token_is_text(plain_file: Path) -> None:
    tokenizer = HuggingFaceTokenizer("bpe", plain_file)
    special = {Tokenizer.from_file(str(plain_file)).token_to_id(token) for token in ("<s>", "</s>")}
    tokens = tokenizer.encode_all(["</s> and <s>"])[0].tolist()
    assert len(tokens) >= 5
    assert not special & set(tokens)


def test_special_tokens_of_the_job_follow_the_vocabulary(plain_file: Path) -> None:
    tokenizer = load_tokenizer("bpe", plain_file)
    spec = tokenizer_spec(tokenizer)
    check_tokenizer(spec, tokenizer)
    assert spec.bos == tokenizer.vocab_size == Tokenizer.from_file(str(plain_file)).get_vocab_size()
    assert spec.vocab_size == tokenizer.vocab_size + 6


def test_a_different_tokenizer_is_refused(plain_file: Path) -> None:
    tokenizer = load_tokenizer("bpe", plain_file)
    spec = tokenizer_spec(tokenizer)
    with pytest.raises(TokenizerError, match="has digest"):
        check_tokenizer(spec.model_copy(update={"digest": "0" * 64}), tokenizer)
    with pytest.raises(TokenizerError, match=r"raise tokenizer\.vocab_size"):
        check_tokenizer(spec.model_copy(update={"vocab_size": 10}), tokenizer)


def test_files_that_are_no_tokenizers(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    for content in (b"", b"{}", b"\xff\xfe", b"[" * 10000):
        broken.write_bytes(content)
        with pytest.raises(TokenizerError, match=r"name a tokenizer\.json"):
            load_tokenizer("broken", broken)
    with pytest.raises(TokenizerError, match="cannot read"):
        load_tokenizer("absent", tmp_path / "absent.json")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, tokenizer\.model or"):
        load_tokenizer("folder", tmp_path)
    with pytest.raises(TokenizerError, match="has no file"):
        load_tokenizer("bpe")
    with pytest.raises(TokenizerError, match="built in"):
        load_tokenizer("bytes", broken)


def test_starting_a_process_after_counting_is_silent(plain_file: Path) -> None:
    script = (
        "import subprocess, sys; from pathlib import Path; from dataserver.assembly import load_tokenizer\n"
        f"t = load_tokenizer('bpe', Path({str(plain_file)!r})); ids = t.encode_all(['the old boat'] * 500)\n"
        "print(sum(map(len, ids)))\n"
        "subprocess.run([sys.executable, '-c', ''], check=True, start_new_session=True)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) > 500
    assert done.stderr == ""


@given(st.lists(st.integers(0, MAX_TEXT_BATCH_BYTES * 3 // 2), max_size=8))
@example([MAX_TEXT_BATCH_BYTES - 1, 1, 1])
@settings(max_examples=20)
def test_batches_keep_every_text_in_order_and_are_bounded(lengths: list[int]) -> None:
    texts = [str(i % 10) * length for i, length in enumerate(lengths)]
    batches = list(text_batches(texts))
    assert [text for batch in batches for text in batch] == texts
    assert all(batches)
    assert all(len(batch) == 1 or sum(map(len, batch)) <= MAX_TEXT_BATCH_BYTES for batch in batches)
    # no two neighbours would fit into one batch
    sizes = [sum(map(len, batch)) for batch in batches]
    firsts = [len(batch[0]) for batch in batches]
    assert all(size + first > MAX_TEXT_BATCH_BYTES for size, first in zip(sizes, firsts[1:], strict=False))


def test_a_dataset_is_counted_once(tmp_path: Path, plain_file: Path) -> None:
    folder = write_pairs(tmp_path, num_samples=20, shard_size=8)
    build_index(folder, workers=1)
    tokenizer = load_tokenizer("bpe", plain_file)
    report = count_tokens(folder, tokenizer)
    assert (report.num_counted, report.num_texts) == (3, 20)
    assert count_tokens(folder, tokenizer).num_counted == 0
    for shard in Dataset.open(folder).shards:
        ids = tokenizer.encode_all([shard.parts(row).texts[0] for row in range(shard.num_samples)])
        assert shard.tokens.counts(tokenizer.digest).tolist() == list(map(len, ids))
        found = [shard.document(row, tokenizer.digest).texts[0] for row in range(shard.num_samples)]
        assert [a.tolist() for a in found] == [a.tolist() for a in ids]


def test_a_tokenizer_file_may_be_so_large_and_no_larger(plain_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = plain_file.stat().st_size
    monkeypatch.setattr(hugging_face, "MAX_TOKENIZER_BYTES", size)
    assert load_tokenizer("bpe", plain_file).name == "bpe"
    monkeypatch.setattr(hugging_face, "MAX_TOKENIZER_BYTES", size - 1)
    with pytest.raises(
        TokenizerError, match=rf"tokenizer file {plain_file} has more than {size - 1} bytes; name a tok"
    ):
        load_tokenizer("bpe", plain_file)


@pytest.mark.parametrize(("words", "size"), [({}, 0), ({"a": 0}, 1), ({"a": 0, "b": 7}, 8)])
def test_all_ids_lie_below_the_size_of_the_vocabulary(tmp_path: Path, words: dict[str, int], size: int) -> None:
    """Also where ids are left out."""
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(path))
    assert HuggingFaceTokenizer("t", path).vocab_size == size
