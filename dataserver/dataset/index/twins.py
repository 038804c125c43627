"""Halves of pairs that lie in different shards, under one name or under two that look alike."""

from collections.abc import Iterable
from dataclasses import replace

from dataserver.dataset.errors import ShardFinding, printable
from dataserver.dataset.kinds import MISSING_CAPTION, ORPHAN_TEXT
from dataserver.dataset.shards.samples import NO_CAPTION, without_spelling


def with_images_elsewhere(findings: Iterable[ShardFinding]) -> list[ShardFinding]:
    """Return findings of a dataset; those of texts without an image say which image of another shard may be theirs."""
    found = list(findings)
    images: dict[str, ShardFinding] = {}
    for one in found:
        if one.kind == MISSING_CAPTION and one.detail.startswith(NO_CAPTION):
            images.setdefault(without_spelling(one.key), one)
    return [_explained(one, images.get(without_spelling(one.key))) if one.kind == ORPHAN_TEXT else one for one in found]


def _explained(text: ShardFinding, image: ShardFinding | None) -> ShardFinding:
    if image is None or image.shard == text.shard:
        return text
    spelled = "" if image.key == text.key else ", in another case or form of Unicode (NFC, NFD)"
    detail = f"a text whose image is {image.key!a} in {image.shard}{spelled}; put both into one tar under one name"
    remedy = "" if spelled else ", or the tars into two folders under one name, and index one with --join the other"
    return replace(text, detail=printable(detail + remedy))
