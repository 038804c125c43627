"""What this server has: datasets and tokenizers by logical name, opened once at start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disttrain.v1 import errors_pb2

from dataserver.dataset.dataset import Dataset
from dataserver.planning.jobspec import DatasetSpec, Stream, TokenizerSpec
from dataserver.preprocessing.tokens import BYTES, Tokenizer, check_tokenizer, load_tokenizer, tokenizer_spec
from dataserver.serving.config import ServerConfig
from dataserver.serving.errors import DataServiceError


@dataclass(frozen=True, slots=True)
class Catalog:
    """Datasets and tokenizers by name; `bytes` is always among the tokenizers."""

    datasets: Mapping[str, Dataset]
    tokenizers: Mapping[str, Tokenizer]

    @classmethod
    def open(cls, config: ServerConfig) -> "Catalog":
        """Open everything that the configuration names.

        Raises:
            DatasetError: a dataset is missing, empty, or its index older than a shard; names the command to run.
            ValueError: a tokenizer's file cannot be used.
        """
        datasets = {
            name: Dataset.open(path, config.index_dirs.get(name), config.quarantines.get(name))
            for name, path in config.datasets.items()
        }
        tokenizers = {name: load_tokenizer(name, path) for name, path in config.tokenizers.items()}
        return cls(datasets, {BYTES: load_tokenizer(BYTES), **tokenizers})

    def find_datasets(self, stream: Stream) -> tuple[Dataset, ...]:
        """The datasets of a job in its order.

        Raises:
            DataServiceError: DATASET_UNKNOWN or DATASET_MISMATCH.
        """
        return tuple(self._dataset(spec) for spec in stream.datasets)

    def _dataset(self, spec: DatasetSpec) -> Dataset:
        dataset = self.named_dataset(spec.name)
        if dataset.fingerprint != spec.fingerprint:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_DATASET_MISMATCH,
                f"dataset {spec.name!r} of the job has fingerprint {spec.fingerprint}, the server's has "
                f"{dataset.fingerprint}: serve the same data, or start a new job with the server's fingerprint",
            )
        found = quarantine_digest(dataset)
        if spec.quarantine and spec.quarantine != found:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_DATASET_MISMATCH,
                f"dataset {spec.name!r} of the job pins quarantine list {spec.quarantine}, the server has "
                f"{found or 'none'}: start the server with --quarantine {spec.name}=FILE of that list",
            )
        return dataset

    def named_dataset(self, name: str) -> Dataset:
        """The dataset of that name.

        Raises:
            DataServiceError: DATASET_UNKNOWN.
        """
        dataset = self.datasets.get(name)
        if dataset is None:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_DATASET_UNKNOWN,
                f"the job names dataset {name[:128]!r}, there are {sorted(self.datasets)}: correct the name in the "
                "job, or add --dataset NAME=PATH to the command",
            )
        return dataset

    def find_tokenizer(self, spec: TokenizerSpec) -> Tokenizer:
        """The tokenizer of a job.

        Raises:
            DataServiceError: TOKENIZER_UNKNOWN or TOKENIZER_MISMATCH.
            TokenizerError: it has more ids than the job's vocabulary.
        """
        tokenizer = self.named_tokenizer(spec.name)
        if tokenizer.digest != spec.digest:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_TOKENIZER_MISMATCH,
                f"tokenizer {spec.name!r} of the job has digest {spec.digest}, the server's file has "
                f"{tokenizer.digest}: serve the same file, or start a new job with the server's digest",
            )
        check_tokenizer(spec, tokenizer)
        return tokenizer

    def named_tokenizer(self, name: str) -> Tokenizer:
        """The tokenizer of that name.

        Raises:
            DataServiceError: TOKENIZER_UNKNOWN.
        """
        tokenizer = self.tokenizers.get(name)
        if tokenizer is None:
            raise DataServiceError(
                errors_pb2.ERROR_REASON_TOKENIZER_UNKNOWN,
                f"the job names tokenizer {name[:128]!r}, there are {sorted(self.tokenizers)}: correct the name in the "
                f"job, or add --tokenizer {name[:128]}=FILE to the command",
            )
        return tokenizer


def quarantine_digest(dataset: Dataset) -> str:
    """Digest of the list that the server has for a dataset; empty without one."""
    return dataset.quarantine.digest if dataset.quarantine else ""


def fill_job(data: Any, catalog: Catalog) -> Any:
    """A job's YAML with what it leaves out filled in from the catalog: fingerprints, quarantine, tokenizer.

    What is there stays; what has not the form of a job is returned as it is, for `parse_job` to refuse.

    Raises:
        DataServiceError: DATASET_UNKNOWN or TOKENIZER_UNKNOWN, one that leaves something out is not in the catalog.
    """
    if not isinstance(data, dict) or not isinstance(data.get("stream"), dict):
        return data
    stream = dict(data["stream"])
    if isinstance(stream.get("datasets"), list):
        stream["datasets"] = [_filled_dataset(entry, catalog) for entry in stream["datasets"]]
    block = stream.get("tokenizer") or {}
    if isinstance(block, dict) and not block.keys() >= TokenizerSpec.model_fields.keys():
        tokenizer = catalog.named_tokenizer(str(block.get("name", BYTES)))
        stream["tokenizer"] = {**tokenizer_spec(tokenizer).model_dump(mode="json"), **block}
    return {**data, "stream": stream}


def _filled_dataset(entry: Any, catalog: Catalog) -> Any:
    if not isinstance(entry, dict) or {"fingerprint", "quarantine"} <= entry.keys():
        return entry
    dataset = catalog.named_dataset(str(entry.get("name")))
    return {"fingerprint": dataset.fingerprint, "quarantine": quarantine_digest(dataset), **entry}
