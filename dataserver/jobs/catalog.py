"""The datasets and tokenizers of this machine by logical name, opened once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dataserver.assembly import BYTES, Tokenizer, check_tokenizer, load_tokenizer
from dataserver.audio import audio_digest, require_audio
from dataserver.dataset import Dataset, texts_key
from dataserver.jobs.errors import DatasetMismatchError, DatasetUnknownError, TokenizerUnknownError
from dataserver.planning.job.fields import DatasetSpec, Stream, TokenizerSpec
from dataserver.planning.stream.captions import Captions
from dataserver.transforms import NO_TRANSFORMS, Kind, TransformPool
from dataserver.video import require_sound, require_video, sound_digest, video_digest


class CatalogPaths(Protocol):
    """Where everything lies, by logical name."""

    @property
    def datasets(self) -> Mapping[str, Path]:
        """Folders of shards by the names of datasets."""

    @property
    def index_dirs(self) -> Mapping[str, Path]:
        """Folder of a dataset's index, where it does not lie beside the shards."""

    @property
    def quarantines(self) -> Mapping[str, Path]:
        """Quarantine list of a dataset."""

    @property
    def tokenizers(self) -> Mapping[str, Path]:
        """Files of Hugging Face's `tokenizers` by name."""

    @property
    def transforms(self) -> Mapping[str, str]:
        """Versions of the installed transforms that jobs may ask for."""

    @property
    def transform_timeout_s(self) -> int:
        """Seconds of one call of a transform."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Datasets and tokenizers by name, and what runs transforms; `bytes` is always among the tokenizers."""

    datasets: Mapping[str, Dataset]
    tokenizers: Mapping[str, Tokenizer]
    transforms: TransformPool = NO_TRANSFORMS

    @classmethod
    def open(cls, paths: CatalogPaths) -> "Catalog":
        """Open everything that is named.

        Raises:
            DatasetError: a dataset is missing or empty, or an index is not that of its shard; names the command to run.
            TokenizerError: a tokenizer's file cannot be used.
            TransformError: a transform is not installed, or another version.
        """
        datasets = {
            name: Dataset.open(path, paths.index_dirs.get(name), paths.quarantines.get(name))
            for name, path in paths.datasets.items()
        }
        tokenizers = {name: load_tokenizer(name, path) for name, path in paths.tokenizers.items()}
        transforms = TransformPool.of(paths.transforms, paths.transform_timeout_s, (Kind.PIXELS,))
        return cls(datasets, {BYTES: load_tokenizer(BYTES), **tokenizers}, transforms)

    def find_datasets(self, stream: Stream) -> tuple[Dataset, ...]:
        """The datasets of a job in its order.

        Raises:
            DatasetUnknownError: one is not here.
            DatasetMismatchError: one has another fingerprint or quarantine list, or transforms made something else.
            TokensMissingError: one was not indexed with its transforms; names the command to run.
        """
        return tuple(self._dataset(spec, stream.tokenizer.digest) for spec in stream.datasets)

    def _dataset(self, spec: DatasetSpec, tokenizer_digest: str) -> Dataset:
        dataset = dataset_of(spec, self.named_dataset(spec.name), tokenizer_digest)
        needed = (
            (dataset.has_audio, require_audio),
            (dataset.has_videos, require_video),
            (dataset.has_sound, require_sound),
        )
        for is_there, require in needed:
            if is_there:
                _require(require, spec.name)
        return dataset

    def named_dataset(self, name: str) -> Dataset:
        """The dataset of that name.

        Raises:
            DatasetUnknownError: it is not here.
        """
        dataset = self.datasets.get(name)
        if dataset is None:
            raise DatasetUnknownError(
                f"no dataset is named {name[:128]!r}, there are {sorted(self.datasets)}: correct the name, or "
                f"start the server (or command) with --dataset {name[:128]}=PATH"
            )
        return dataset

    def audio_digest(self) -> str:
        """Digest of what this machine makes of audio clips; empty where no dataset has any, or it cannot read them."""
        return _digest(any(dataset.has_audio for dataset in self.datasets.values()), require_audio, audio_digest)

    def video_digest(self) -> str:
        """Digest of how videos are decoded, if any dataset has videos."""
        return _digest(any(dataset.has_videos for dataset in self.datasets.values()), require_video, video_digest)

    def sound_digest(self) -> str:
        """Digest of how the sound of videos is decoded, if any dataset has some."""
        return _digest(any(dataset.has_sound for dataset in self.datasets.values()), require_sound, sound_digest)

    def check_tokenizer(self, spec: TokenizerSpec) -> None:
        """Find out whether the tokenizer of a job is here.

        Raises:
            TokenizerUnknownError: it is not here.
            TokenizerError: it has another digest, or more ids than the job's vocabulary.
        """
        check_tokenizer(spec, self.named_tokenizer(spec.name))

    def named_tokenizer(self, name: str) -> Tokenizer:
        """The tokenizer of that name.

        Raises:
            TokenizerUnknownError: it is not here.
        """
        tokenizer = self.tokenizers.get(name)
        if tokenizer is None:
            raise TokenizerUnknownError(
                f"no tokenizer is named {name[:128]!r}, there are {sorted(self.tokenizers)}: correct the name, or "
                f"start the server (or command) with --tokenizer {name[:128]}=FILE"
            )
        return tokenizer


def dataset_of(spec: DatasetSpec, newest: Dataset, tokenizer_digest: str) -> Dataset:
    """The dataset of a job, from the one of its name that is here.

    Raises:
        DatasetMismatchError: it has another fingerprint or quarantine list, and never had that fingerprint; or
            transforms made something else of it.
        TokensMissingError: it was not indexed with the job's transforms; names the command to run.
    """
    dataset = newest.as_it_was(spec.fingerprint)
    if dataset is None:
        raise DatasetMismatchError(
            f"dataset {spec.name!r} of the job has fingerprint {spec.fingerprint}, the one here has "
            f"{newest.fingerprint}: serve the data that the job was made with, or leave fingerprint out of a new "
            "job, to take this one"
        )
    found = quarantine_digest(dataset)
    if spec.quarantine and spec.quarantine != found:
        raise DatasetMismatchError(
            f"dataset {spec.name!r} of the job pins quarantine list {spec.quarantine}, the one here is "
            f"{found or 'none'}: start the server with --quarantine {spec.name}=FILE of that list, or leave "
            "quarantine out of a new job, to take this one"
        )
    made = transformed_digest(spec, dataset, tokenizer_digest)
    if spec.transformed is not None and spec.transformed != made:
        raise DatasetMismatchError(
            f"dataset {spec.name!r}: the job was made with the transformed data {spec.transformed}, this server has "
            f"{made or 'none'}. Copy the index that the job was made with; or, to use this one, leave transformed out "
            "of a new job. A transform must return the same everywhere; if it changes, its package needs a new version"
        )
    return dataset


def transformed_digest(spec: DatasetSpec, dataset: Dataset, tokenizer_digest: str) -> str:
    """Digest of what the transforms of a job made of a dataset, when it was indexed; empty without any.

    Raises:
        TokensMissingError: it was not indexed with them; names the command to run.
    """
    texts = [texts_key(tokenizer_digest, name) for name in Captions.of(spec).transformed]
    return dataset.transformed(metadata_keys(spec), texts)


def metadata_keys(spec: DatasetSpec) -> tuple[str, ...]:
    """Keys of the transforms of a dataset's metadata."""
    return tuple(transform.key() for transform in spec.metadata_transforms or ())


def _require(library: Callable[[], None], name: str) -> None:
    """Raise DatasetUnknownError where this server cannot decode audio, or video."""
    try:
        library()
    except ValueError as error:
        raise DatasetUnknownError(f"dataset {name!r} cannot be served here: {error}") from error


def _digest(is_there: bool, require: Callable[[], None], digest: Callable[[], str]) -> str:
    """What `digest` says; empty where no dataset needs it, or what `require` asks for is not here."""
    if not is_there:
        return ""
    try:
        require()
    except ValueError:  # jobs on that dataset are refused with the reason
        return ""
    return digest()


def quarantine_digest(dataset: Dataset) -> str:
    """Digest of a dataset's quarantine list; empty without one."""
    return dataset.quarantine.digest if dataset.quarantine else ""
