"""Halves of pairs that lie in different shards, under one name or under two that look alike."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dataserver.dataset.errors import ShardFinding, printable
from dataserver.dataset.kinds import MISSING_CAPTION, ORPHAN_TEXT
from dataserver.dataset.shards.samples import NO_CAPTION
from dataserver.dataset.shards.seen import by_last_part, without_spelling


def with_images_elsewhere(findings: Iterable[ShardFinding]) -> list[ShardFinding]:
    """Return findings of a dataset; those of texts without an image say which image of another shard may be theirs."""
    found = list(findings)
    images: dict[str, ShardFinding] = {}
    for one in found:
        if one.kind == MISSING_CAPTION and one.detail.startswith(NO_CAPTION):
            images.setdefault(without_spelling(one.key), one)
    by_name = by_last_part(images)
    return [_explained(one, images, by_name) if one.kind == ORPHAN_TEXT else one for one in found]


def _explained(
    text: ShardFinding, images: Mapping[str, ShardFinding], by_name: Mapping[str, ShardFinding]
) -> ShardFinding:
    spelling = without_spelling(text.key)
    image = images.get(spelling)
    how = "" if image is None or image.key == text.key else ", in another case or form of Unicode (NFC, NFD)"
    if image is None and (image := by_name.get(spelling.rpartition("/")[2])) is not None:
        how = ", in another folder, which is a part of its key"
    if image is None or image.shard == text.shard:
        return text
    detail = f"a text whose image is {image.key!a} in {image.shard}{how}; put both into one tar under one name"
    remedy = "" if how else ", or the tars into two folders under one name, and index one with --join the other"
    return replace(text, detail=printable(detail + remedy))
