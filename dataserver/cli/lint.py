"""`dataserver lint`."""

import json as json_format
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import tyro

from dataserver.cli.arguments import MaybePath, Switch
from dataserver.cli.progress import progress_bar
from dataserver.dataset import KINDS, LintReport
from dataserver.dataset import lint as lint_dataset
from dataserver.images import silence_pillow_warnings, undecodable
from dataserver.outputs import require_writable

ODD: Final = 1
"""Exit status where something is odd."""


def lint(
    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    index_dir: MaybePath = None,
    decode: Switch = False,
    quarantine_file: MaybePath = None,
    json: Switch = False,
) -> None:
    """Print everything that is odd in an indexed dataset, one line each: shard, key, kind, detail.

    The key is empty where something belongs to a shard and to no sample. docs/datasets.md explains the kinds. The exit
    status is 0 where nothing is odd, 1 where something is, and 2 where the dataset cannot be checked.

    Args:
        path: Folder of shards, or a single shard.
        index_dir: Folder of the index, where it does not lie beside the shards.
        decode: Decode every image too, as servers do.
        quarantine_file: File for the list of all samples that are named; a server takes it with --quarantine NAME=FILE.
        json: Print one JSON document instead.
    """
    silence_pillow_warnings()
    if quarantine_file is not None and quarantine_file.parent.exists():  # otherwise it is made
        require_writable("--quarantine-file", quarantine_file)
    with progress_bar(f"checking {path.name}") as report:
        found = lint_dataset(path, index_dir, undecodable if decode else None, quarantine_file, report)
    if json:
        print(json_format.dumps(_document(found), indent=1))
    else:
        _show(found, quarantine_file)
    if found.counts:
        raise SystemExit(ODD)


def _document(found: LintReport) -> dict[str, object]:
    return {
        "samples": found.num_samples,
        "counts": dict(found.counts),
        "findings": [{**asdict(finding), "effect": KINDS[finding.kind]} for finding in found.findings],
        "unlisted": found.num_unlisted,
        "quarantine": {"samples": found.quarantine.num_samples, "digest": found.quarantine.digest},
    }


def _show(found: LintReport, quarantine_file: Path | None) -> None:
    for finding in found.findings:
        print("\t".join((finding.shard, finding.key, finding.kind, finding.detail)))
    if found.num_unlisted:
        print(f"{found.num_unlisted} more are counted only: a shard lists a few MiB of what is odd in it")
    counts = ", ".join(f"{count} {kind}" for kind, count in found.counts.items()) or "nothing odd"
    print(f"{found.num_samples} samples; {counts}")
    if quarantine_file is not None:
        print(f"{found.quarantine.num_samples} samples in {quarantine_file}, digest {found.quarantine.digest}")
        unnamed = sum(not finding.key for finding in found.findings)
        if unnamed:
            print(f"{unnamed} findings name a shard and no sample: no quarantine list can hold them")
