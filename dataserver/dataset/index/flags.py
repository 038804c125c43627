"""The flags of `dataserver index` that a dataset was indexed with, for messages that say how to index it again.

A line of JSON in the folder of the indexes. It decides nothing: what an index holds, its header says. Anybody may
delete it; messages then name no flags.
"""

import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dataserver.dataset.errors import DatasetError, canonical, is_safe
from dataserver.dataset.index.notes import read_note, write_note
from dataserver.dataset.index.rules import DEFAULT_RULES, IndexRules, choices
from dataserver.dataset.shards.listing import ShardFile, index_folder

FLAGS_NAME: Final = "disttrain.flags"
_MAX_BYTES: Final = 1 << 16

_log = logging.getLogger(__name__)


def flags_of(rules: IndexRules) -> list[str]:
    """Return the flags by which `dataserver index` gets these rules, without those that it has by default."""
    defaults = choices(DEFAULT_RULES)
    flags = [text for name, value in choices(rules).items() if value != defaults[name] for text in (f"--{name}", value)]
    if rules.allow_duplicates:
        flags.append("--allow-duplicates")
    for join in rules.joins:
        flags += ["--join", str(join.absolute())]
    if rules.images_root is not None:
        flags += ["--images-root", str(rules.images_root.absolute())]
    for source in rules.captions:
        flags += ["--caption", f"{source.name}={source}"]
    return flags


def write_flags(folder: Path, rules: IndexRules) -> None:
    """Note the flags in the folder of the indexes; a warning where that is impossible."""
    path, flags = folder / FLAGS_NAME, flags_of(rules)
    if flags == _read_flags(folder):
        return
    try:
        if not flags:
            path.unlink(missing_ok=True)
            return
        write_note(path, canonical(flags))
    except (DatasetError, OSError) as error:
        _log.warning("%s; messages that say how to index the dataset again name no flags", error)


def command_of(shard: ShardFile, flags: Sequence[str]) -> str:
    """Return the command that indexes the dataset of a shard with these flags, as a shell takes it."""
    where = ["--index-dir", str(shard.index_dir)] if shard.index_dir else []
    return shlex.join(["dataserver", "index", str(shard.dataset or shard.root), *where, *flags])


def index_command(shard: ShardFile) -> str:
    """Return the command that indexes the dataset of a shard again, with the flags it was indexed with."""
    return command_of(shard, _read_flags(index_folder(shard)))


def transform_flags(key: str) -> str:
    """Return the flags that name the transforms of a key (`key_of`), as a shell takes them."""
    found, decoder = [], json.JSONDecoder()
    while key:
        name, _, rest = key.partition(" ")
        options, end = decoder.raw_decode(rest)
        found += ["--transform", f"{name}:{rest[:end]}" if options else name]
        key = rest[end:].removeprefix("; ")
    return shlex.join(found)


def _read_flags(folder: Path) -> list[str]:
    try:
        flags = read_note(folder / FLAGS_NAME, _MAX_BYTES)
    except (OSError, ValueError, RecursionError):
        return []
    known = isinstance(flags, list) and all(isinstance(flag, str) and is_safe(flag) for flag in flags)
    return flags if known else []
