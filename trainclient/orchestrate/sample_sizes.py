"""Sizes of samples, as `dataserver sizes` writes them or as people do."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from dataserver.planning.job.fields import AudioSizing, Modality, Sizing, TextError, describe, parse_yaml
from dataserver.planning.stream.item_sizes import audio_sizing, has_timestamps
from dataserver.planning.stream.tiles import LAYOUT

MAX_COUNT: Final = 1 << 40
MAX_SIZES: Final = 100_000
MAX_FILE_BYTES: Final = 64 << 20
_LISTS: Final = ("image_tokens", "modality", "groups", "layouts", "image_texts")
"""What a sample may say of each of its items."""
_MODALITIES: Final = (Modality.IMAGE, Modality.AUDIO, Modality.VIDEO)


class WorkloadError(ValueError):
    """Sizes that no job could train on."""


class Item(NamedTuple):
    """An image, a clip or a video of a sample."""

    modality: Modality
    rows: int
    """Patches of an image or a video, positions of a clip."""
    groups: int
    """Groups of frames of a video, whose patches attend to each other alone; else 1."""
    tokens: int
    """Backbone tokens, without those around it."""


@dataclass(frozen=True, slots=True)
class SampleSize:
    """Samples of one size. Its items are images, clips and videos, in the order of the sample."""

    count: int
    text_tokens: int
    patches: tuple[int, ...]
    """Number of patches of each image or video, of positions of each clip."""
    image_tokens: tuple[int, ...] = ()
    """Backbone tokens of each item, where images are cut into tiles or videos have timestamps; else they follow from
    the patches."""
    modality: tuple[Modality, ...] = ()
    """What each item is; empty where all are images."""
    groups: tuple[int, ...] = ()
    """Groups of frames of each item, 1 of what is no video; empty where there are no videos."""
    layouts: tuple[tuple[int, ...], ...] = ()
    """How each item is cut into tiles (`planning.stream.tiles`), where images are."""
    image_texts: tuple[int, ...] = ()
    """Text tokens before each item, where images of documents may be generated."""

    def items(self, merge: int, audio: AudioSizing) -> tuple[Item, ...]:
        """Its items, where merge x merge patches become a token, and clips are sized so."""
        modality = self.modality or (Modality.IMAGE,) * len(self.patches)
        groups = self.groups or (1,) * len(self.patches)
        tokens = self.image_tokens or tuple(
            rows // (audio.merge if of is Modality.AUDIO else merge**2)
            for rows, of in zip(self.patches, modality, strict=True)
        )
        return tuple(map(Item, modality, self.patches, groups, tokens))


class Sizes(NamedTuple):
    """What a file of sizes holds."""

    samples: tuple[SampleSize, ...]
    sizing: Sizing | None
    """Sizing by which they were sized; None where the file does not say."""


def read_sizes(path: Path) -> Sizes:
    """Sizes of samples from a JSON or YAML file: `samples`, each with `count` (by default 1), `text_tokens`, `patches`.

    Raises:
        WorkloadError: the file cannot be read, or holds something else.
    """
    data = _read(path)
    entries = data.get("samples") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not 1 <= len(entries) <= MAX_SIZES:
        raise WorkloadError(
            f"{path} holds no list `samples` of 1 to {MAX_SIZES} sizes, each as {{count: 10, text_tokens: 40, patches: "
            "[256]}; `dataserver sizes` writes such a file"
        )
    sizing = _sizing(data.get("sizing"), path)
    if sizing is None and "tile_patches" in data:
        raise WorkloadError(
            f"{path} has `tile_patches` and no `sizing`, which says how images are cut into tiles; let `dataserver "
            "sizes --job` write the file again"
        )
    samples = tuple(_size(entry, f"{path}, samples[{number}]") for number, entry in enumerate(entries))
    tiled = sizing is not None and sizing.tiles is not None
    if any(size.patches and bool(size.layouts) != tiled for size in samples):
        raise WorkloadError(
            f"{path}: `layouts` of each item are required where `sizing` has tiles, and there alone; let `dataserver "
            "sizes --job` write the file"
        )
    if sizing is not None and has_timestamps(sizing):
        _check_timestamps(samples, sizing, path)
    return Sizes(samples, sizing)


def _check_timestamps(samples: Sequence[SampleSize], sizing: Sizing, path: Path) -> None:
    """Refuse videos without the tokens of their timestamps: with none stated, or fewer than they have embeddings."""
    of_videos = [size for size in samples if Modality.VIDEO in size.modality]
    if any(not size.image_tokens for size in of_videos):
        raise WorkloadError(
            f"{path}: `image_tokens` of each item are required where `sizing` has timestamps and a sample has videos; "
            "let `dataserver sizes --job` write the file"
        )
    items = [item for size in of_videos for item in size.items(sizing.merge, audio_sizing(sizing))]
    short = [i for i in items if i.modality is Modality.VIDEO and i.tokens < i.rows // sizing.merge**2]
    if short:
        raise WorkloadError(
            f"{path}: `image_tokens` has {short[0].tokens} for a video of {short[0].rows} patches, which has "
            f"{short[0].rows // sizing.merge**2} embeddings and the tokens of its timestamps; let `dataserver sizes "
            "--job` write the file"
        )


def _read(path: Path) -> Any:
    """The values of a file."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise WorkloadError(f"{path} has more than {MAX_FILE_BYTES} bytes; count samples of like size together")
        return json.loads(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    except WorkloadError:
        raise
    except (ValueError, RecursionError, TextError) as error:
        raise WorkloadError(f"{path} cannot be used: {error}") from None


def _sizing(data: Any, path: Path) -> Sizing | None:
    """The sizing that a file states."""
    if data is None:
        return None
    try:
        return Sizing.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise WorkloadError(f"{path}: sizing cannot be used: {describe(error, data, Sizing)}") from None


def _size(entry: Any, where: str) -> SampleSize:
    found: Mapping[str, Any] = entry if isinstance(entry, dict) else {}
    unknown = found.keys() - {field.name for field in fields(SampleSize)}
    count, tokens, patches = found.get("count", 1), found.get("text_tokens", 0), found.get("patches", [])
    lists = {name: found[name] for name in _LISTS if name in found}
    are_lists = isinstance(patches, list) and all(isinstance(of, list) for of in lists.values())
    right = (
        are_lists
        and not unknown
        and all(map(_is_count, [count, tokens, *patches]))
        and count >= 1
        and 0 not in patches
        and all(len(of) == len(patches) and _is_list(name, of) for name, of in lists.items())
    )
    if not right:
        raise WorkloadError(
            f"{where} is {entry!r:.200}; count (1 or more), text_tokens and patches (a list) are required, all "
            f"integers; {', '.join(_LISTS)}, where given, have an entry for each of the patches"
        )
    if not tokens and not patches:
        raise WorkloadError(f"{where} has neither text nor images; leave it out")
    lists["modality"] = [Modality(name) for name in lists.get("modality", ())]
    lists["layouts"] = [tuple(layout) for layout in lists.get("layouts", ())]
    size = SampleSize(count, tokens, tuple(patches), **{name: tuple(of) for name, of in lists.items()})
    wrong = [n for n, groups in zip(patches, size.groups, strict=False) if n % groups]
    if wrong or (Modality.VIDEO in size.modality and not size.groups):
        raise WorkloadError(
            f"{where}: the patches of a video are those of all its groups of frames, a multiple of them"
        )
    return size


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def _is_list(name: str, values: Sequence[Any]) -> bool:
    """Whether a list holds what it should, for each item."""
    if name == "modality":
        return all(value in _MODALITIES for value in values)
    if name == "layouts":
        return all(isinstance(v, list) and len(v) == LAYOUT and all(map(_is_count, v)) for v in values)
    return all(_is_count(value) and (value > 0 or name != "groups") for value in values)
