"""Tokenizers by their files: folders, models of SentencePiece and ranks of tiktoken, against their own libraries."""

import base64
import io
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dataserver.assembly import load_tokenizer
from dataserver.assembly.hugging_face import TokenizerError
from dataserver.assembly.tiktoken_ranks import PATTERNS
from dataserver.dataset import TokenizingError

sentencepiece = pytest.importorskip("sentencepiece", reason="installed by scripts/setup")
tiktoken = pytest.importorskip("tiktoken", reason="installed by scripts/setup")

CORPUS = ["the quick brown fox jumps over the lazy dog", "two cats and an old boat on the river 2024"] * 40
LETTERS = "the quick cat  \n\t0123'sll<>image|/éß中\U0001f408"


def lines(count: int) -> list[str]:
    draw = random.Random(4)
    return ["".join(draw.choices(LETTERS, k=draw.randrange(60))) for _ in range(count)]


def model(path: Path, **options: object) -> Path:
    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=buffer, minloglevel=2, hard_vocab_limit=False, **options
    )
    path.write_bytes(buffer.getvalue())
    return path


def ranks(path: Path, tokens: list[bytes]) -> Path:
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), n) for n, token in enumerate(tokens)))
    return path


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("has_bytes", [False, True])
def test_models_give_the_ids_of_the_library(tmp_path: Path, kind: str, has_bytes: bool) -> None:
    size = 340 if has_bytes else 60
    path = model(tmp_path / "tokenizer.model", vocab_size=size, model_type=kind, byte_fallback=has_bytes)
    texts = lines(10_000)
    found = load_tokenizer("x", path).encode_all(texts)
    expected = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(texts)
    assert sum(map(len, expected)) > 100_000
    assert all(np.array_equal(ids, own) and ids.dtype == np.int32 for ids, own in zip(found, expected, strict=True))


def test_symbols_of_a_model_are_no_part_of_texts(tmp_path: Path) -> None:
    path = model(
        tmp_path / "a.model", vocab_size=340, byte_fallback=True, model_type="bpe",
        user_defined_symbols=["<image>", "<img>", "\u2581\u2581"], control_symbols=["<ctrl>"],
    )  # fmt: skip
    tokenizer = load_tokenizer("x", path)
    own = sentencepiece.SentencePieceProcessor(model_file=str(path))
    reserved = {own.piece_to_id(symbol) for symbol in ("<image>", "<img>", "<ctrl>", "<s>", "</s>", "<unk>")}
    assert set(range(tokenizer.vocab_size)) - tokenizer.from_text == reserved
    texts = ["a <image> b", "<image>", "<image><img>", "\uff1cimage\uff1e", "x" * 50 + "<image>", "</s><ctrl>"]
    assert own.piece_to_id("<image>") in own.encode(texts[0])
    for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert set(ids.tolist()) <= tokenizer.from_text
        decoded = own.decode(ids.tolist())
        assert decoded.replace(" ", "") == text.translate({0xFF1C: "<", 0xFF1E: ">"}).replace(" ", "")


def test_memory_that_is_missing_is_no_error_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("x", model(tmp_path / "a.model", vocab_size=60, model_type="bpe"))

    class Model:
        def encode(self, *_: object, **__: object) -> None:
            raise MemoryError

    monkeypatch.setattr(tokenizer, "_model", Model())
    with pytest.raises(MemoryError):
        tokenizer.encode_all(["a"])


def test_ranks_give_the_ids_of_the_library(tmp_path: Path) -> None:
    pairs = [b"th", b"the", b" c", b"at", b" cat", b" q", b"ui", b"qui", "é".encode(), b"\n\n", b"20"]
    path = ranks(tmp_path / "a.tiktoken", [*(bytes([n]) for n in range(256)), *pairs])
    with pytest.raises(
        TokenizerError, match=r"has 267 ranks, as no published vocabulary; write the pattern .* into .*a"
    ):
        load_tokenizer("x", path)
    pattern = PATTERNS[128_000]
    path.with_name("a.tiktoken.pattern").write_text(f"{pattern}\n")
    tokenizer = load_tokenizer("x", tmp_path)
    held = {base64.b64decode(line.split()[0]): n for n, line in enumerate(path.read_bytes().splitlines())}
    own = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=held, special_tokens={"<image>": 300})
    texts = [*lines(10_000), "<image> <|endoftext|>", ""]
    expected = own.encode_ordinary_batch(texts)
    assert all(np.array_equal(ids, n) for ids, n in zip(tokenizer.encode_all(texts), expected, strict=True))
    assert (tokenizer.vocab_size, len(tokenizer.from_text)) == (267, 267)
    before = tokenizer.digest
    path.with_name("a.tiktoken.pattern").write_text(r"\S+|\s+")
    assert load_tokenizer("x", path).digest != before


@pytest.mark.parametrize("size", PATTERNS)
def test_published_vocabularies_are_told_by_their_ranks(tmp_path: Path, size: int) -> None:
    tokens = [*(bytes([n]) for n in range(256)), *(n.to_bytes(3, "big") for n in range(size - 256))]
    tokenizer = load_tokenizer("x", ranks(tmp_path / "a.tiktoken", tokens))
    text = "It's 2024, they'LL say: caf\u00e9 \u732b\n\n  ok"
    (ids,) = tokenizer.encode_all([text])
    assert b"".join(tokens[n] for n in ids) == text.encode()


def test_a_folder_is_looked_into(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json, tokenizer\.model or NAME\.tiktoken"):
        load_tokenizer("x", tmp_path)
    model(tmp_path / "tokenizer.model", vocab_size=60, model_type="bpe")
    assert load_tokenizer("x", tmp_path).digest == load_tokenizer("y", tmp_path / "tokenizer.model").digest
    own = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer("x", tmp_path).vocab_size == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\x05hello", "is no model of sentencepiece"),
        (b"\n" + b"\xff" * 40, "is no model of sentencepiece"),
        (b"YQ== 0\nnot base64 1\n", "line 2 of .* is no token and rank"),
        (b"YQ== 0\nYg== 0\n", "has a rank twice"),
        (b"YQ== 99999999\n", "or one beyond"),
        (b"", "is no tokenizer of the Hugging Face"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer("x", path)


def test_a_byte_without_a_rank_is_an_error_of_the_text(tmp_path: Path) -> None:
    path = ranks(tmp_path / "few.tiktoken", [b"a", b"b"])
    path.with_name(f"{path.name}.pattern").write_text(r"\p{L}+")
    tokenizer = load_tokenizer("few", path)
    assert [ids.tolist() for ids in tokenizer.encode_all(["ab"])] == [[0, 1]]
    with pytest.raises(TokenizingError):
        tokenizer.encode_all(["xyz"])
