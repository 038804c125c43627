"""Datasets of many seeds by all rules: what is served, word by word and byte by byte, and what is found, are what the
generator says."""

from collections import Counter
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from odd_shards.rule_verdicts import UNENCODABLE, Expected
from odd_shards.ruled import RuledDataset, content_of, make_ruled

from dataserver.dataset import (
    Dataset,
    DatasetError,
    IndexRules,
    KeyEnd,
    OnTokenError,
    SeveralImages,
    Shard,
    TextOnly,
    TokenizingError,
    build_index,
    count_tokens,
    lint,
    parse_captions,
    texts_key,
)
from dataserver.images import fault_of

SEEDS: Final = 60
"""What the generator draws between them, a test says."""
AT_ONCE: Final = 20


class Picky:
    """A tokenizer of bytes that raises for one character."""

    name = "picky"
    digest = "picky 1"
    vocab_size = 256

    def encode_all(self, texts: list[str]) -> list[np.ndarray]:
        if any(UNENCODABLE in text for text in texts):
            raise TokenizingError("it melts")
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


def rules_of(made: RuledDataset) -> IndexRules:
    return IndexRules(
        text_only=TextOnly.ALLOW if made.rules.allow_texts else TextOnly.LEAVE_OUT,
        on_token_error=OnTokenError.SKIP if made.rules.skip_token_errors else OnTokenError.REFUSE,
        key=KeyEnd.LAST_DOT if made.rules.last_dot else KeyEnd.FIRST_DOT,
        several_images=SeveralImages.ALL if made.rules.all_images else SeveralImages.FIRST,
        captions=parse_captions([str(caption) for caption in made.rules.captions]),
        joins=tuple(made.joins),
    )


def count_all(made: RuledDataset) -> None:
    """Count tokens of all texts, or see the first that cannot be encoded refused by name."""
    for name in ("", *(caption.name for caption in made.rules.captions)):
        bad = made.unencodable(name)
        if bad and not made.rules.skip_token_errors:
            with pytest.raises(DatasetError, match=rf"{bad[0][0]}, sample '{bad[0][1]}': tokenizer picky .*melts"):
                count_tokens(made.folder / "d", Picky(), caption=name or "own")
            return
        count_tokens(made.folder / "d", Picky(), caption=name or "own")
        made.said += bad


def check_sample(dataset: Dataset, shard: Shard, row: int, expected: Expected) -> None:
    offsets = shard.sizes().image_offsets
    refs = [shard.image(row, i) for i in range(int(offsets[row + 1] - offsets[row]))]
    assert shard.parts(row).texts == expected.texts
    assert [(ref.width, ref.height) for ref in refs] == [part.size for part in expected.images]
    assert [dataset.read(ref) for ref in refs] == [content_of(part) for part in expected.images]


def check(folder: Path, seed: int) -> None:
    made = make_ruled(folder, seed)
    build_index(folder / "d", workers=1, rules=rules_of(made))
    count_all(made)
    found = lint(folder / "d", judge=fault_of)
    assert Counter((f.shard, f.key, f.kind) for f in found.findings) == Counter(made.said), seed
    dataset = Dataset.open(folder / "d", may_be_empty=True)
    for shard in dataset.shards:
        served = made.verdicts[shard.name].served
        assert shard.keys() == list(served), seed
        for row, key in enumerate(served):
            check_sample(dataset, shard, row, served[key])
        for caption in made.rules.captions:
            expected = [made.caption(key, caption.name) for key in served]
            column = f"caption.{caption.name}"
            stored = shard.column(column).to_pylist() if column in shard.columns else [None] * len(served)
            assert stored == expected, seed
            if made.rules.skip_token_errors:
                failed = shard.tokens.not_encodable(texts_key(Picky.digest, caption.name))
                keys = [key for key, bad in zip(served, [] if failed is None else failed, strict=False) if bad]
                assert keys == [key for name, key, _ in made.unencodable(caption.name) if name == shard.name], seed


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(AT_ONCE, SEEDS, AT_ONCE))]
)
def test_what_is_served_and_found_by_rules_is_what_the_generator_says(tmp_path: Path, first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        check(tmp_path / f"{seed}", seed)


@pytest.mark.long
@pytest.mark.parametrize("first", range(SEEDS, 1000, 47))
def test_a_thousand_seeds(tmp_path: Path, first: int) -> None:
    for seed in range(first, min(first + 47, 1000)):
        check(tmp_path / f"{seed}", seed)


def test_the_generator_draws_every_kind_by_every_rule(tmp_path: Path) -> None:
    kinds: Counter[str] = Counter()
    rules: Counter[object] = Counter()
    for seed in range(SEEDS):
        made = make_ruled(tmp_path / f"{seed}", seed)
        kinds.update(kind for *_, kind in (*made.said, *made.unencodable()))
        kinds.update(["document"] * any(s.captions is None for v in made.verdicts.values() for s in v.served.values()))
        kinds.update(path.name for path in made.joins)
        rules.update([("last", made.rules.last_dot), ("all", made.rules.all_images), ("texts", made.rules.allow_texts)])
        rules.update([("skip", made.rules.skip_token_errors), *((c.name, True) for c in made.rules.captions)])
    wanted = "missing_caption missing_image not_utf8 bad_json unreadable_header duplicate_key duplicate_member"
    wanted += " orphan_text unused_part extra_image missing_named_caption missing_partner row_without_sample"
    wanted += " sample_without_row token_error document texts images scores table.parquet"
    assert {kind for kind in wanted.split() if kinds[kind] < 3} == set()
    names = [(name, True) for name in ("alt", "blip", "depth", "long", "own2", "short")]
    flags = [(name, value) for name in ("last", "all", "texts", "skip") for value in (True, False)]
    assert [one for one in (*names, *flags) if rules[one] < 3] == []
