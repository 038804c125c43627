"""`trainclient checkpoints`: what a folder has, who wrote it, and whether it is whole."""

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from trainclient.checkpoint.lease_file import Found, Output, current
from trainclient.checkpoint.selection import NAME, has_state, survey
from trainclient.checkpoint.state import STATE_FILE, CheckpointError, Manifest, read_manifest
from trainclient.checkpoint.sums import damages, extras, misfits
from trainclient.training.config_base import options_of

DESCRIPTION = """List the checkpoints of a folder: what they hold, who wrote them, and whether they are whole. Ends with
status 1 if one of them is not."""
WIDTH = 1000
"""Columns of a table that is no terminal's: lines are not broken."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


@dataclass(frozen=True, slots=True)
class ListConfig:
    """Which folder to list, and how thoroughly."""

    directory: tyro.conf.Positional[Path]
    """Folder of checkpoints, or one checkpoint."""
    verify: Annotated[bool, tyro.conf.arg(help_behavior_hint="")] = False
    """Read every file and compare its checksum; without this flag only names and sizes are compared."""


@dataclass(frozen=True, slots=True)
class Row:
    """What the listing shows of one folder."""

    path: Path
    manifest: Manifest | None
    whole: str
    broken: bool
    notes: tuple[str, ...] = ()

    @property
    def order(self) -> tuple[int, int, str]:
        """Older lines first, and in them lower steps."""
        if self.manifest is None:
            return (1 << 62, 0, self.path.name)
        return self.manifest.line.number, self.manifest.state.step, self.path.name


def list_checkpoints(config: ListConfig) -> tuple[str, bool]:
    """A table of a folder's checkpoints, and whether all of them are whole.

    Raises:
        CheckpointError: there is no such folder, or it cannot be read.
    """
    try:
        found = rows(config.directory, verify=config.verify)
        owner = current(Output("", config.directory))
    except OSError as error:
        raise CheckpointError(
            f"the folder {config.directory} cannot be read ({error.strerror}); give the folder that "
            "--checkpoint.directory names"
        ) from None
    lines = [_table(found) if found else f"{config.directory} has no checkpoints\n"]
    lines += [f"{row.path.name}: {note}\n" for row in found for note in row.notes]
    if owner is not None:
        lines.append(f"{_owned(owner)}\n")
    return "".join(lines), not any(row.broken for row in found)


def rows(directory: Path, *, verify: bool) -> list[Row]:
    """All folders that are checkpoints, or are named like some; OSError if the folder cannot be read."""
    if os.path.exists(directory / STATE_FILE):  # noqa: PTH110 - it is one itself
        return [_row(directory.resolve(), None, False, verify=verify)]
    seen = survey(directory)
    copies = {u.path: u.reason for u in seen.unusable if u.is_copy}
    newest = seen.stored[0].path if seen.stored and not seen.broken(seen.stored[0].step) else None
    found = []
    for path in sorted(directory.iterdir()):
        if path.name.startswith(".") or not path.is_dir():
            continue
        named = NAME.fullmatch(path.name) is not None
        # Others, such as a disk's lost+found, need not let everybody look into them.
        if has_state(path) if named else os.path.exists(path / STATE_FILE):  # noqa: PTH110
            found.append(_row(path, copies.get(path), path == newest, verify=verify))
        elif named:
            found.append(Row(path, None, f"no: it has no {STATE_FILE}", True))
    return sorted(found, key=lambda row: row.order)


def _row(path: Path, copied: str | None, is_newest: bool, *, verify: bool) -> Row:
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return Row(path, None, "no: see below", True, (str(error),))
    notes = [copied] if copied else []
    if NAME.fullmatch(path.name) is None:
        notes.append(f"holds step {manifest.state.step}, and no run goes on from a folder of this name")
    notes += [f"{name} is not part of it" for name in extras(path, manifest)]
    if manifest.files is None:
        return Row(path, manifest, "unknown", False, (*notes, "an older release wrote it without checksums"))
    problems = (damages if verify else misfits)(path, manifest.files)
    whole = "no: see below" if problems else "yes" if verify else "sizes fit"
    newest = "newest: a run goes on from here"
    return Row(
        path, manifest, whole, bool(problems), (*problems, *notes, *([newest] if is_newest and not problems else []))
    )


def _owned(lease: Found) -> str:
    """Say in words who owns the folder."""
    if lease.owner is None:
        return f"the lease {lease.path} cannot be understood ({lease.problem})"
    ended = ", which has ended: the next run takes the folder" if lease.is_free else ""
    return f"owned by {lease.owner}{ended}"


def _table(found: Sequence[Row]) -> str:
    table = Table(
        "checkpoint", "step", "stream", "degrees", "size", "whole", "run", "host", "attempt", "saved", box=None
    )
    for row in found:
        manifest = row.manifest
        if manifest is None:
            table.add_row(row.path.name, *["?"] * 4, row.whole, *["?"] * 4)
            continue
        state, writer = manifest.state, manifest.writer
        stream = str(state.cursor.get("stream_id", "?"))[:12]
        size = "?" if manifest.files is None else _size(sum(f.bytes for f in manifest.files.values()))
        by = ("?", "?", "?") if writer is None else (writer.host, writer.attempt[:8], writer.saved)
        degrees = _degrees(manifest)
        table.add_row(row.path.name, str(state.step), stream, degrees, size, row.whole, state.run or "?", *by)
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False).print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _degrees(manifest: Manifest) -> str:
    """As `encoder dp2, backbone dp4 pp2`; degrees of one are left out."""
    modules = manifest.state.degrees.items()
    named = [
        f"{name} {' '.join(f'{d}{n}' for d, n in degrees.items() if n != 1) or 'dp1'}" for name, degrees in modules
    ]
    return ", ".join(named) or "?"


def _size(num_bytes: float) -> str:
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} {_UNITS[-1]}"


def main(arguments: Sequence[str]) -> int:
    """List a folder; 1 if a checkpoint in it is not whole."""
    config = options_of(ListConfig, "checkpoints", DESCRIPTION, arguments)
    text, all_whole = list_checkpoints(config)
    sys.stdout.write(text)
    return 0 if all_whole else 1
