"""`dataserver lint`."""

from pathlib import Path
from typing import Annotated

import tyro

from dataserver.cli.arguments import MaybePath, Switch
from dataserver.cli.progress import progress_bar
from dataserver.dataset import lint as lint_dataset


def lint(
    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    index_dir: MaybePath = None,
    decode: Switch = False,
    quarantine_file: MaybePath = None,
) -> None:
    """Print everything that is odd in an indexed dataset, one line each: shard, key, kind, detail.

    Args:
        path: Folder of shards, or a single shard.
        index_dir: Folder of the index, where it does not lie beside the shards.
        decode: Decode every image too.
        quarantine_file: File for the list of samples that do not decode; a server takes it with --quarantine NAME=FILE.
    """
    if quarantine_file is not None and not decode:
        raise ValueError("--quarantine-file lists what does not decode; add --decode")
    with progress_bar(f"checking {path.name}") as report:
        found = lint_dataset(path, index_dir, decode, quarantine_file, report)
    for finding in found.findings:
        print("\t".join((finding.shard, finding.key, finding.kind, finding.detail)))
    counts = ", ".join(f"{count} {kind}" for kind, count in found.counts.items()) or "nothing odd"
    print(f"{found.num_samples} samples; {counts}")
    if quarantine_file is not None:
        print(f"{found.quarantine.num_samples} samples in {quarantine_file}, digest {found.quarantine.digest}")
