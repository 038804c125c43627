"""`dataserver convert`: rewrites datasets of other formats as plain tars."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from dataserver.cli.arguments import MaybeInt, MaybePath
from dataserver.cli.progress import progress_bar
from dataserver.cli.ray_cluster import tasks_of
from dataserver.dataset import KINDS, MediaMembers, location, printable
from dataserver.dataset import convert as convert_dataset

_MOST_SHOWN = 3


def convert(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")],
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")],
    shard_mb: int = 1024,
    workers: MaybeInt = None,
    engine: Literal["local", "ray"] = "local",
    images_root: MaybePath = None,
    audio: MediaMembers = MediaMembers.SERVE,
    video: MediaMembers = MediaMembers.SERVE,
) -> None:
    """Rewrite a dataset as plain tars, which cost least to read.

    Images, clips and videos keep their bytes. Each tar made from rows is read again before it counts as finished. If
    the command is killed, run it again and it continues.

    Args:
        source: Folder of tars, compressed tars (.gz, .zst, .bz2, .xz), Parquet files, JSONL manifests, MDS shards,
            Lance datasets (extra `lance`), or image, audio and video files; or one file, which may be an array of JSON.
        target: Folder for the tars: new, empty, or that of a run that was killed.
        shard_mb: Size at which a tar of rows is closed, MiB; a compressed tar becomes one tar.
        workers: Processes; one for each core by default.
        engine: Where files are converted: on this machine, or on all nodes of a Ray cluster, which see the same files.
        images_root: Folder that paths in manifests are relative to; by default that of each manifest.
        audio: Clips that manifests name, or that are in plain columns of bytes: convert them, or ignore them, so that
            the entries of manifests stay as they are.
        video: The same for videos.
    """
    if shard_mb < 1:
        raise ValueError(f"--shard-mb is {shard_mb}; give at least 1")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers is {workers}; give at least 1")
    source = location(source)
    with tasks_of(engine) as tasks, progress_bar(f"converting {source.name}", in_bytes=True) as report:
        found = convert_dataset(source, target, shard_mb << 20, workers, report, tasks, images_root, audio, video)
    print(f"{target}")
    print(f"  files        {found.num_sources} ({found.num_converted} converted now)")
    print(f"  tars         {found.num_tars}")
    if found.num_samples:
        print(f"  rows         {found.num_samples} became samples")
    for kind, count in found.findings.items():
        print(f"  {KINDS[kind]:<12} {count} {kind}")
        details = {(one.key, one.detail): name for name, one in reversed(found.details) if one.kind == kind}
        for (key, detail), name in [*reversed(details.items())][:_MOST_SHOWN]:  # a column is told of once
            print(f"    {printable(name, 80)}: {f'{key}: ' if key else ''}{detail}")
    links = [name for name in found.passed_over if name.endswith("/")]
    others = [name for name in found.passed_over if not name.endswith("/")]
    for names, what in ((others, "other files"), (links, "links to folders (convert these folders themselves)")):
        if names:
            more = ", ..." if len(names) > _MOST_SHOWN else ""
            print(f"  passed over  {len(names)} {what}: {', '.join(map(ascii, names[:_MOST_SHOWN]))}{more}")
    if found.left_over:
        shown, more = map(ascii, found.left_over[:_MOST_SHOWN]), ", ..." if len(found.left_over) > _MOST_SHOWN else ""
        print(f"  left over    {len(found.left_over)} files of sources that are gone: {', '.join(shown)}{more}")
        print("               index serves them; remove them if they belong to the dataset no longer")
    print(f"  next         dataserver index {target}")
