"""The job of a command line: read, filled in, and planned over the datasets that the flags name."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self

import tyro

from dataserver.assembly import BYTES, load_tokenizer
from dataserver.cli.arguments import MaybePath, Pairs, named_paths, tokenizer_files
from dataserver.dataset import Dataset, ShardFinding
from dataserver.job_files import read_job
from dataserver.jobs import Catalog, JobPlanner, fill_job, long_chat_findings, split_findings
from dataserver.planning.job.identity import parse_job, parse_stream
from dataserver.serving.config import ServerConfig, load_config


@dataclass(frozen=True, slots=True)
class DataFlags:
    """Flags that say where datasets and tokenizers lie."""

    dataset: Pairs = ()
    """Dataset by the name that the job uses; may be repeated."""
    index_dir: Pairs = ()
    """Folder of a dataset's index, if it is not beside the shards; may be repeated."""
    quarantine: Pairs = ()
    """Quarantine list of a dataset; may be repeated."""
    tokenizer: Pairs = ()
    """Tokenizer by the name that the job uses; may be repeated. `bytes` is built in."""
    config: MaybePath = None
    """YAML file of `dataserver serve`, with the same names."""

    def settings(self) -> ServerConfig:
        """The configuration of a server that has these datasets and tokenizers.

        Raises:
            ValueError: the file or a flag cannot be used.
        """
        flags = {
            "datasets": named_paths("dataset", self.dataset),
            "index_dirs": named_paths("index-dir", self.index_dir),
            "quarantines": named_paths("quarantine", self.quarantine),
            "tokenizers": tokenizer_files(self.tokenizer),
        }
        return load_config(self.config, {key: paths for key, paths in flags.items() if paths})


Data = Annotated[DataFlags, tyro.conf.arg(name="")]
"""The flags of every command that reads indexes: --dataset, --index-dir, --quarantine, --tokenizer, --config."""
NO_DATA: Final = DataFlags()


def open_job(job: Path, data: DataFlags) -> JobPlanner:
    """The planner of the job in a file, over the datasets and tokenizers that flags name.

    Raises:
        ValueError: the file, a flag, or what they name cannot be used, or the job does not fit the datasets.
    """
    return planner_of(job, Catalog.open(data.settings()))


def planner_of(job: Path, catalog: Catalog) -> JobPlanner:
    """The planner of the job in a file, over open datasets and tokenizers.

    Raises:
        ValueError: the file cannot be used, or the job does not fit the datasets.
    """
    parsed = parse_job(fill_job(read_job(job), catalog))
    datasets = catalog.find_datasets(parsed.stream)
    catalog.check_tokenizer(parsed.stream.tokenizer)
    return JobPlanner(parsed, datasets)


def dataset_names(job: Any) -> tuple[str, ...]:
    """The names of the datasets in the values of a job, as far as it looks like one."""
    stream = job.get("stream") if isinstance(job, dict) else None
    entries = stream.get("datasets") if isinstance(stream, dict) else None
    names = [entry.get("name") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return tuple(name for name in names if isinstance(name, str))


@dataclass(frozen=True, slots=True)
class WrittenStream:
    """The stream of the job in a file, as it is written there."""

    file: Path
    stream: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the file, once for all that is asked of it.

        Raises:
            ValueError: the file cannot be read, or holds no job.
        """
        data = read_job(file)
        stream = data.get("stream") if isinstance(data, dict) else None
        entries = stream.get("datasets") if isinstance(stream, dict) else None
        if (
            not isinstance(stream, dict)
            or not isinstance(entries, list)
            or not all(isinstance(e, dict) for e in entries)
        ):
            raise ValueError(f"--job {file} has no list stream.datasets; the file of a job is required")
        return cls(file, stream)

    def datasets(self, name: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The datasets, each with what the job calls it: the one of a name, or all without one.

        Raises:
            ValueError: there is none of that name.
        """
        found = [(str(entry.get("name", "")), entry) for entry in self.stream["datasets"]]
        names = [called for called, _ in found]
        if name and name not in names:
            raise ValueError(f"--name is {name!r}, the datasets of {self.file} are {names}; give one of them")
        return [(called, entry) for called, entry in found if name in ("", called)]

    def long_datasets(self, name: str, dataset: Dataset) -> list[tuple[str, Mapping[str, Any]]]:
        """Those that say what becomes of long samples like those of a dataset; as `datasets`."""
        return [found for found in self.datasets(name) if found[1].get(_field(dataset)) is not None]

    @property
    def tokenizer(self) -> str:
        """The name of the tokenizer; a job that names none has `bytes`."""
        block = self.stream.get("tokenizer")
        name = block.get("name", BYTES) if isinstance(block, Mapping) else BYTES
        return name if isinstance(name, str) else BYTES  # what is no name is refused with the whole job


def long_samples(job: WrittenStream, name: str, dataset: Dataset, tokenizers: Mapping[str, Path]) -> list[ShardFinding]:
    """The samples of a dataset that are too long for the sequences of a job: conversations that are cut or left out,
    documents that are split.

    Args:
        job: its stream.
        name: what the job calls the dataset; empty where only one of it has conversations, or documents.
        dataset: the open dataset.
        tokenizers: by logical name, with the one that the job names.

    Raises:
        ValueError: the job, the name or the tokenizer cannot be used, the job's tokenizer is not given, or the dataset
            is not the job's.
    """
    entries = job.long_datasets(name, dataset)
    if not entries:
        return []
    if len(entries) > 1:
        raise ValueError(
            f"--job {job.file} has {_field(dataset)} of {[called for called, _ in entries]}; choose one by --name"
        )
    ((called, entry),) = entries
    stream = {key: value for key, value in job.stream.items() if key != "continues"}
    stream["datasets"] = [{**entry, "weight": "1"}]  # its own, and modules, may need the other datasets
    loaded = {BYTES: load_tokenizer(BYTES, None)}
    loaded |= {known: load_tokenizer(known, path) for known, path in tokenizers.items()}
    if (wanted := job.tokenizer) not in loaded:
        file = "FOLDER" if dataset.are_chats else "FILE"
        raise ValueError(
            f"--job {job.file} has tokenizer {wanted!r}, which is not given; add --tokenizer {wanted}={file}"
        )
    filled = fill_job({"stream": stream}, Catalog({called: dataset}, loaded))
    findings = long_chat_findings if dataset.are_chats else split_findings
    return list(findings(parse_stream(filled["stream"]), dataset))


def _field(dataset: Dataset) -> str:
    """The field of a job's datasets that says what becomes of long samples."""
    return "conversations" if dataset.are_chats else "documents"
