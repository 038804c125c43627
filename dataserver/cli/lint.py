"""`dataserver lint`: lists the findings of a dataset."""

import json as json_format
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from dataserver.assembly import BYTES, fault_of
from dataserver.cli.arguments import DatasetPath, MaybePath, Switch, Text, Transforms, tokenizer_files
from dataserver.cli.jobs import WrittenStream, long_samples
from dataserver.cli.progress import progress_bar
from dataserver.cli.verified_transforms import verify
from dataserver.dataset import KINDS, Dataset, LintReport, ShardFinding, location, printable
from dataserver.dataset import lint as lint_dataset
from dataserver.images import silence_pillow_warnings
from dataserver.outputs import require_writable
from dataserver.planning.plan.naming import counted

FOUND: Final = 1
"""Exit status where there are findings."""


def lint(
    path: DatasetPath,
    index_dir: MaybePath = None,
    quarantine: MaybePath = None,
    decode: Switch = False,
    quarantine_file: MaybePath = None,
    json: Switch = False,
    verify_transforms: Transforms = (),
    job: MaybePath = None,
    name: Text = "",
    tokenizer: str = BYTES,
) -> None:
    """Print the findings of an indexed dataset, one line each: shard, key, kind, detail; then a table of kinds.

    The key is empty if a finding belongs to a whole shard. docs/datasets.md explains the kinds. The exit status is 0 if
    there are no findings, 1 if there are some, and 2 if the dataset cannot be checked.

    Args:
        path: Folder of shards, or a single shard.
        index_dir: Folder of the index, if it is not beside the shards.
        quarantine: Quarantine list of the dataset, for --job.
        decode: Also decode every image, clip and video, as servers do.
        quarantine_file: File for the list of all samples that are left out or invalid; a server takes it with
            --quarantine NAME=FILE.
        json: Print one JSON document instead.
        verify_transforms: Installed transform to run on 64 samples in two processes: it must not fail, and must give
            the same each time. NAME=VERSION, or NAME=VERSION:OPTIONS with an object of JSON; may be repeated.
        job: YAML or JSON file of a job. Conversations that are longer than its sequences, and documents that it splits,
            then are findings too.
        name: Name of the dataset in the job, if several of its datasets have conversations or documents.
        tokenizer: Tokenizer of the job, for --job: NAME=FILE or `bytes`; for conversations NAME=FOLDER with the chat
            template.
    """
    silence_pillow_warnings()
    path = location(path)
    if quarantine_file is not None and quarantine_file.parent.exists():  # otherwise it is made
        require_writable("--quarantine-file", quarantine_file)
    written = None if job is None else WrittenStream.read(job)
    with progress_bar(f"checking {path.name}") as report:
        found = lint_dataset(path, index_dir, fault_of if decode else None, quarantine_file, report)
    if written is not None:
        dataset = Dataset.open(path, index_dir, quarantine)
        found = with_more(found, long_samples(written, name, dataset, tokenizer_files([tokenizer])))
    if verify_transforms:
        found = with_more(found, list(verify(Dataset.open(path, index_dir), verify_transforms)))
    if json:
        print(json_format.dumps(_document(found), indent=1))
    else:
        _show(found, quarantine_file)
    if found.counts:
        raise SystemExit(FOUND)


def with_more(found: LintReport, more: Sequence[ShardFinding]) -> LintReport:
    """A report with findings about transforms or a job, which leave its quarantine list as it is: no sample is at
    fault."""
    counts = Counter(found.counts) + Counter(finding.kind for finding in more)
    return replace(found, findings=(*found.findings, *more), counts=dict(sorted(counts.items())))


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
        print("\t".join((printable(finding.shard), printable(finding.key), finding.kind, finding.detail)))
    if found.num_unlisted:
        print(f"{found.num_unlisted} more are counted only: a shard lists a few MiB of its findings")
    if quarantine_file is not None:
        print(
            f"{counted(found.quarantine.num_samples, 'sample')} in {quarantine_file}, digest {found.quarantine.digest}"
        )
        unnamed = sum(not finding.key for finding in found.findings)
        if unnamed:
            print(f"{counted(unnamed, 'finding')} of a shard and no sample: no quarantine list can hold them")
    if not found.counts:
        print(f"{counted(found.num_samples, 'sample')}, no findings")
        return
    print(f"{counted(found.num_samples, 'sample')}, {counted(sum(found.counts.values()), 'finding')}:")
    width = max(map(len, found.counts))
    for kind, count in sorted(found.counts.items(), key=lambda item: (KINDS[item[0]], item[0])):
        print(f"  {kind:<{width}}  {count:>8}  {KINDS[kind]}")
