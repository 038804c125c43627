"""Folders that `energon prepare` prepared: splits and fields, which `.nv-meta` has as data.

Its `sample_loader.py` is code and never run.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dataserver.dataset.errors import DatasetError, printable
from dataserver.dataset.shards.captions import CaptionSource
from dataserver.dataset.storage.etags import check_regular
from dataserver.dataset.storage.registry import storage_of
from dataserver.dataset.storage.urls import written_out

META_FOLDER: Final = ".nv-meta"
SPLIT_NAME: Final = "split.yaml"
DATASET_NAME: Final = "dataset.yaml"
DEFAULT_SPLIT: Final = "train"
SEPARATOR: Final = "#"
"""Stands between a folder and the name of a split."""
MAX_NAMES: Final = 1 << 20
MAX_META_BYTES: Final = 16 << 20
MAX_ENTRY: Final = 1024
"""Characters of the name of a shard, or of what stands for several."""
_FIELD: Final = re.compile(r"([A-Za-z0-9_.-]{1,64})(?:\[([^\[\]]{1,128})\])?")
_IMAGES: Final = ("image", "images")
_TEXTS: Final = ("caption", "text", "texts")
CAPTION: Final = "energon"
"""Name of the caption that a field map gives."""


def split_of(path: Path) -> tuple[Path, str]:
    """Return the folder and the split that a path of a dataset names; an empty split where it names none."""
    folder, separator, split = path.name.rpartition(SEPARATOR)
    if separator and split and folder and not path.exists():
        return path.with_name(folder), split
    return path, ""


def unused_shards(root: Path, names: Collection[str], split: str) -> dict[str, str]:
    """Return the shards that are not in a split, each with what helps; none where the folder has no splits.

    Args:
        root: of the dataset.
        names: of all its shards, relative to the root.
        split: its name; that of training where it is empty.

    Raises:
        DatasetError: there is no such split, or its file cannot be used.
    """
    found = _read(root, SPLIT_NAME)
    parts = found.get("split_parts")
    if parts is None and not split:
        return {}
    if not isinstance(parts, Mapping) or not all(isinstance(part, list) for part in parts.values()):
        raise DatasetError(f"{root} has no splits in {META_FOLDER}/{SPLIT_NAME}; name the folder without {SEPARATOR}")
    wanted = split or DEFAULT_SPLIT
    if wanted not in parts:
        known = ", ".join(printable(name, 40) for name in parts if isinstance(name, str))
        raise DatasetError(f"{root} has no split {wanted!a}; it has {known}: name {root}{SEPARATOR}SPLIT")
    excluded = set(_names(found.get("exclude") or [], root))
    if alone := next((name for name in sorted(excluded) if name not in names and "/" in name), ""):
        raise DatasetError(
            f"{root}/{META_FOLDER}/{SPLIT_NAME} excludes the sample {printable(alone, 80)!a}; put such samples into a"
            " quarantine list"
        )
    chosen = set(_names(parts[wanted], root)) - excluded
    if missing := sorted(chosen - set(names)):
        raise DatasetError(
            f"the split {wanted!a} of {root} has {len(missing)} shards that are not there, the first is"
            f" {printable(missing[0], 80)!a}; copy them, or prepare the folder again"
        )
    if not chosen:
        raise DatasetError(f"the split {wanted!a} of {root} has no shards; name another one: {root}{SEPARATOR}SPLIT")
    remedy = f"it is not in the split {wanted!a} of {META_FOLDER}/{SPLIT_NAME}; name FOLDER{SEPARATOR}SPLIT for another"
    return dict.fromkeys(sorted(set(names) - chosen), remedy)


def field_captions(root: Path) -> tuple[tuple[CaptionSource, ...], frozenset[str]]:
    """Return the text that the field map of a folder names, and the members that are its images; nothing without one.

    Raises:
        DatasetError: the field map cannot be used.
    """
    fields = _read(root, DATASET_NAME).get("field_map")
    if fields is None:
        return (), frozenset()
    if not isinstance(fields, Mapping) or not all(isinstance(value, str) for value in fields.values()):
        raise DatasetError(f"{root}/{META_FOLDER}/{DATASET_NAME} has a field_map that is none; mend it or remove it")
    captions: tuple[CaptionSource, ...] = ()
    if text := next((fields[name] for name in _TEXTS if name in fields), ""):
        member, entry = _field(root, text)
        if (member, entry) not in (("txt", ""), ("json", "caption")):
            captions = (CaptionSource(CAPTION, member, entry),)
    image = next((fields[name] for name in _IMAGES if name in fields), "")
    images = frozenset(_field(root, one)[0] for one in image.split(";") if one)
    return captions, images


def _field(root: Path, value: str) -> tuple[str, str]:
    """Member and entry of a field such as `jpg` or `json[caption]`."""
    found = _FIELD.fullmatch(value)
    if found is None:
        raise DatasetError(
            f"{root}/{META_FOLDER}/{DATASET_NAME} maps a field to {printable(value, 80)!a}; a member such as 'jpg', or"
            " an entry such as 'json[caption]' is required"
        )
    return found[1].lower(), found[2] or ""


def _names(entries: Sequence[Any], root: Path) -> Iterator[str]:
    """The names of shards, ranges such as `{000..009}` written out."""
    num_names = 0
    for entry in entries:
        if not isinstance(entry, str):  # whatever aliases make of it, it is not written out
            raise DatasetError(f"{root}/{META_FOLDER}/{SPLIT_NAME} names a shard by a {type(entry).__name__}")
        if len(entry) > MAX_ENTRY:
            raise DatasetError(
                f"{root}/{META_FOLDER}/{SPLIT_NAME}: {printable(entry, 80)!a} has more than {MAX_ENTRY} characters"
            )
        try:
            names = written_out(entry, MAX_NAMES - num_names)
        except ValueError as error:
            raise DatasetError(f"{root}/{META_FOLDER}/{SPLIT_NAME}: {printable(entry, 80)!a}: {error}") from None
        num_names += len(names)
        yield from names


def _read(root: Path, name: str) -> Mapping[str, Any]:
    """What a file of the meta folder says; nothing where it is not there."""
    path = root / META_FOLDER / name
    try:
        check_regular(path)
        storage_of(path).check(root, f"{META_FOLDER}/{name}")
        with path.open("rb") as file:
            data = file.read(MAX_META_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error.strerror or error}); mend it or remove it") from error
    import yaml  # few datasets have such files

    try:
        if len(data) > MAX_META_BYTES:
            raise ValueError(f"it has more than {MAX_META_BYTES} bytes")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, and much faster in C
        found = yaml.load(data, loader)  # noqa: S506  both are safe
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise DatasetError(f"{path} cannot be read ({printable(str(error))}); mend it or remove it") from error
    if not isinstance(found, Mapping):
        raise DatasetError(f"{path} is no mapping; prepare the folder again")
    return found
