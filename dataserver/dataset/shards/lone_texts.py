"""Texts without an image: samples in a dataset of texts, lost halves of pairs in any other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from dataserver.dataset.errors import Findings
from dataserver.dataset.kinds import FAILED_DOWNLOAD, ORPHAN_TEXT
from dataserver.dataset.shards.samples import Sample
from dataserver.dataset.shards.seen import Seen, without_spelling

OTHER_FOLDER: Final = (
    "folders are parts of keys, so that these are two samples; make the tar again with both under one name, one after"
    " the other"
)
"""What is said of halves of a pair that lie in different folders."""
SUCCESS = "success"
"""What img2dataset writes as the status of a sample that it stored."""


def without_failures(
    samples: Iterable[Sample], failed: Callable[[str], str | None], findings: Findings
) -> Iterator[Sample]:
    """Leave out texts whose download failed, as .json or the sidecar says.

    Args:
        samples: of one shard.
        failed: returns the status that the sidecar gives a key, where it is no success.
        findings: where they are counted.
    """
    for sample in samples:
        if sample.is_lone_text:
            status = sample.scalars.get("status") or failed(sample.key)
            if isinstance(status, str) and status != SUCCESS:
                message = sample.scalars.get("error_message")
                reason = f": {message}" if isinstance(message, str) else ""
                findings.add(sample.key, FAILED_DOWNLOAD, f"its status is {status}{reason}")
                continue
        yield sample


def without_orphans(samples: Iterable[Sample], seen: Seen, is_known: bool, findings: Findings) -> Iterator[Sample]:
    """Leave out texts without an image, if the shard has images or another one is known to.

    Args:
        samples: of one shard.
        seen: what was seen of the shard so far.
        is_known: whether another shard of the dataset has images.
        findings: where they are counted.
    """
    waiting: list[Sample] = []  # until an image is seen, nobody knows whether this is a dataset of texts
    orphans: list[str] = []
    for sample in samples:
        if sample.images and not waiting:
            yield sample
            continue
        waiting.append(sample)
        if is_known or seen.has_images:
            yield from _with_images(waiting, orphans)
            waiting = []
    yield from _with_images(waiting, orphans) if is_known or seen.has_images else waiting
    elsewhere = seen.images_by_last_part() if orphans else {}
    for key in orphans:  # when all images are known
        findings.add(key, ORPHAN_TEXT, _orphan(key, seen, elsewhere))


def _with_images(samples: Iterable[Sample], orphans: list[str]) -> Iterator[Sample]:
    for sample in samples:
        if sample.is_lone_text:
            orphans.append(sample.key)
        else:
            yield sample


def _orphan(key: str, seen: Seen, elsewhere: Mapping[str, str]) -> str:
    """Say what is known of the image of a text; `elsewhere` is as `images_by_last_part`."""
    spelled = without_spelling(key)
    image = seen.lone_images.get(spelled)
    if image is not None:
        return (
            f"a text called {key!a}, whose image is called {image!a}: the two differ in case or in the form of Unicode"
            " (NFC, NFD) alone; spell them alike"
        )
    if (image := elsewhere.get(spelled.rpartition("/")[2])) is not None:
        return f"a text called {key!a}, whose image is called {image!a}: {OTHER_FOLDER}"
    return (
        "a text without its image, in a dataset that has images; is the image called otherwise, or in another"
        " tar? index with --text-only allow to serve such texts"
    )
