"""Text of strangers never becomes a reserved id, whatever a tokenizer's file says; all other ids are the library's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from dataserver.assembly.hugging_face import HuggingFaceTokenizer, TokenizerError
from dataserver.assembly.tokens import check_tokenizer, tokenizer_spec
from dataserver.dataset import TokenizingError

RESERVED = ["<image>", "</s>", "[IMG]", "eot", "<unk>"]
"""Words of control that all files below have."""
LETTERS = "abcdefghijklmnopqrstuvwxyzIMG<>/[] "


def _bytes(special: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.add_tokens([AddedToken(word, special=special) for word in RESERVED])
    model.add_tokens([AddedToken(" " * n, normalized=False) for n in range(2, 6)])  # as GPT-NeoX has them
    return model


def _unigram() -> Tokenizer:
    """As T5: its own vocabulary finds `</s>`, though nothing recognises the added token."""
    words = [("<unk>", 0.0), ("</s>", 0.0), ("<image>", 0.0), ("[IMG]", 0.0), ("eot", -1.0)]
    model = Tokenizer(models.Unigram([*words, *((c, -5.0) for c in LETTERS.replace(" ", "\u2581"))], 0, False))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    model.add_special_tokens(RESERVED)
    return model


def _words() -> Tokenizer:
    """Whole words, by any compatible spelling."""
    vocabulary = {word: i for i, word in enumerate([*RESERVED, *LETTERS, "plain", "words"])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.normalizer = normalizers.NFKC()
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_tokens(RESERVED)
    return model


def _whole_words_first() -> Tokenizer:
    """As Llama 3: a word that the vocabulary has as a whole is taken before any merge."""
    vocabulary = {c: i for i, c in enumerate([*LETTERS, *RESERVED])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    model.add_tokens(RESERVED)
    return model


FILES: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: _bytes(special=False),
    "special bytes": lambda: _bytes(special=True),
    "unigram": _unigram,
    "words": _words,
    "whole words first": _whole_words_first,
}


@pytest.fixture(scope="module", params=FILES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / f"{request.param.replace(' ', '-')}.json"
    FILES[request.param]().save(str(path))
    return path


def reserved_ids(file: Path) -> set[int]:
    model = Tokenizer.from_file(str(file))
    unknown = {model.token_to_id("<unk>")} if "bytes" not in file.name else set()
    return {model.token_to_id(word) for word in RESERVED} - unknown


TRICKS = [
    "a <image> b",
    "</s>",
    "x</s></s>y",
    "<image><image>",
    "[IMG]",
    "plain eot words",
    "\uff1c\uff0fs\uff1e",
    "<imag</s>e>",
]


def test_no_text_has_a_reserved_id(file: Path) -> None:
    tokenizer, reserved = HuggingFaceTokenizer("t", file), reserved_ids(file)
    for text, ids in zip(TRICKS, tokenizer.encode_all(TRICKS), strict=True):
        assert len(ids), text
        assert not reserved & set(ids.tolist()), text
    assert not reserved & tokenizer.from_text


@settings(max_examples=40)
@given(texts=st.lists(st.text(st.sampled_from(LETTERS)) | st.sampled_from([*RESERVED, *TRICKS]), max_size=8))
def test_nor_has_any_mixture_of_them(file: Path, texts: list[str]) -> None:
    tokenizer = HuggingFaceTokenizer("t", file)
    for ids in tokenizer.encode_all(["".join(texts), *texts]):
        assert not reserved_ids(file) & set(ids.tolist())


@settings(max_examples=40)
@given(text=st.text(st.sampled_from("abcdefg \n\u00e9")))
def test_ordinary_text_has_the_ids_of_the_library(file: Path, text: str) -> None:
    """Runs of spaces, too, for which vocabularies have added tokens."""
    expected = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    assert HuggingFaceTokenizer("t", file).encode_all([text])[0].tolist() == expected


def test_added_runs_of_spaces_are_found(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    _bytes(special=False).save(str(path))
    tokenizer = HuggingFaceTokenizer("t", path)
    spaces = Tokenizer.from_file(str(path)).token_to_id("    ")
    assert tokenizer.encode_all(["a    b"])[0].tolist()[1] == spaces
    assert spaces in tokenizer.from_text


def test_a_reserved_character_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    model = Tokenizer(models.WordLevel({"a": 0, "$": 1}, unk_token="a"))
    model.add_special_tokens(["$"])
    model.save(str(path))
    with pytest.raises(TokenizingError, match=r"'\$' alone is the reserved id 1"):
        HuggingFaceTokenizer("t", path).encode_all(["$"])


def test_what_is_left_of_a_cut_word_may_be_one_that_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    model = Tokenizer(models.WordLevel({"a": 0, "<image>": 1}))
    model.add_special_tokens(["<image>"])
    model.save(str(path))
    with pytest.raises(TokenizingError, match=r"Missing \[UNK\] token"):
        HuggingFaceTokenizer("t", path).encode_all(["a", "<image>"])


def test_a_job_cannot_reserve_what_text_has(file: Path) -> None:
    tokenizer = HuggingFaceTokenizer("t", file)
    spec = tokenizer_spec(tokenizer)
    for taken in sorted(tokenizer.from_text)[:3]:
        with pytest.raises(TokenizerError, match=rf"tokenizer.image is {taken}, which tokenizer t makes of text, too"):
            check_tokenizer(spec.model_copy(update={"image": taken}), tokenizer)
    for free in reserved_ids(file):
        check_tokenizer(spec.model_copy(update={"image": free, "eos": free}), tokenizer)


def test_an_unknown_word_is_reserved_where_every_byte_is_known(tmp_path: Path) -> None:
    """As CLIP's file has it, whose `<|endoftext|>` is both."""
    path = tmp_path / "t.json"
    _bytes(special=True).save(str(path))
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = "</s>"
    path.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer("t", path)
    end = Tokenizer.from_file(str(path)).token_to_id("</s>")
    assert end not in tokenizer.from_text
    assert end not in tokenizer.encode_all(["\U0001f408 </s>"])[0].tolist()
