"""`dataserver describe`: shows what a dataset holds."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dataserver.assembly import BYTES, load_tokenizer
from dataserver.cli.arguments import DatasetPath, MaybePath, Text, Transforms, tokenizer_files
from dataserver.cli.card_page import card_page
from dataserver.cli.jobs import WrittenStream, long_samples
from dataserver.cli.progress import progress_bar
from dataserver.dataset import Dataset, lint, location, printable
from dataserver.jobs import dataset_card
from dataserver.outputs import require_writable, tells_on, write_output
from dataserver.reporting.card_sections import Section, bars, card_sections
from dataserver.transforms import parse_transform

WIDTH = 80
"""Characters of a line of the report."""


def describe(
    path: DatasetPath,
    index_dir: MaybePath = None,
    quarantine: MaybePath = None,
    tokenizer: str = BYTES,
    transform: Transforms = (),
    job: MaybePath = None,
    name: Text = "",
    output: MaybePath = None,
) -> None:
    """Show what an indexed dataset holds: samples, images, tokens, sizes, columns, findings, and what filters drop.

    It reads only the index. `dataserver lint` lists the findings that are counted here.

    Args:
        path: Folder of shards, or a single shard.
        index_dir: Folder of the dataset's index, if it is not beside the shards.
        quarantine: Quarantine list of the dataset.
        tokenizer: Tokenizer by which `dataserver index` counted tokens, NAME=FILE or `bytes`; for conversations
            NAME=FOLDER with the chat template that rendered them.
        transform: Transform of metadata that `dataserver index` applied, NAME=VERSION or NAME=VERSION:OPTIONS; may be
            repeated. Its columns are shown as well, and filters may name them.
        job: YAML or JSON file of a job, to show what its filter drops of this dataset and, if --tokenizer is the job's,
            how many conversations are longer than its sequences and how many documents it splits.
        name: Name of the dataset in the job, if the job has several. By default all filters are shown, and long samples
            are counted if only one of the job's datasets has any.
        output: Self-contained HTML file to write as well; - is stdout.
    """
    path = location(path)
    named = tokenizer_files([tokenizer])
    loaded = load_tokenizer(*next(iter(named.items()), (BYTES, None)))
    written = None if job is None else WrittenStream.read(job)
    filters = [] if written is None else list(_filters(written, name))
    require_writable("--output", output)
    dataset = Dataset.open(path, index_dir, quarantine)
    counts, uncounted = Counter(lint(path, index_dir).counts), ""
    if written is not None and len(entries := written.long_datasets(name, dataset)) == 1:
        if not dataset.are_chats and (wanted := written.tokenizer) != loaded.name:
            uncounted = (
                f"Documents that the job splits are not counted: its tokenizer is {wanted!r}, and --tokenizer gives "
                f"{loaded.name!r}"
            )
        else:
            counts.update(finding.kind for finding in long_samples(written, entries[0][0], dataset, named))
    with progress_bar(f"describing {path.name}") as report:
        card = dataset_card(dataset, loaded, filters, report, [parse_transform(entry) for entry in transform])
    sections = list(card_sections(card, counts))
    title = printable(str(path))
    if output is not None:
        write_output("--output", output, card_page(title, card, sections))
    _show(title, sections, output)
    if uncounted:
        print(f"\n{printable(uncounted)}", file=tells_on(output))


def _show(title: str, sections: Sequence[Section], output: Path | None) -> None:
    out = tells_on(output)
    print(title, file=out)
    for section in sections:
        print(f"\n{section.title}", file=out)
        for line in bars(section, WIDTH):
            print(line, file=out)


def _filters(job: WrittenStream, name: str) -> Iterator[str]:
    """The filters of a job, of the dataset that is called so, or of all.

    Raises:
        ValueError: the job has no dataset of that name, or a filter is no text.
    """
    for called, entry in job.datasets(name):
        condition = entry.get("filter", "")
        if not isinstance(condition, str):
            raise ValueError(f"--job {job.file}: the filter of dataset {called!r} is no text; put it in quotes")
        if condition:
            yield condition
