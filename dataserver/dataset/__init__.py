"""Shards, storage and index: input and output, no policy."""

from dataserver.dataset.arrays import Array, ArraysError, read_arrays, write_arrays
from dataserver.dataset.build import BuildReport, build_index
from dataserver.dataset.cache import LruCache
from dataserver.dataset.cores import usable_cores
from dataserver.dataset.dataset import Dataset
from dataserver.dataset.descriptions import SampleDescription, describe
from dataserver.dataset.errors import (
    DatasetError,
    FilterError,
    Oddity,
    OddityReport,
    QuarantineError,
    ShardReadError,
    StaleIndexError,
    TokensMissingError,
    printable,
)
from dataserver.dataset.filters import Filter, compile_filter
from dataserver.dataset.kinds import KINDS, Effect
from dataserver.dataset.lint import Finding, LintReport, lint
from dataserver.dataset.memory import Memory, processes_within, usable_memory
from dataserver.dataset.numeric import ShardSizes
from dataserver.dataset.parts import IMAGE, TEXT, Scalar
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shard import DocumentParts, ImageRef, Shard, TokenizedDocument
from dataserver.dataset.tokens import TextTokenizer, TokensReport, count_tokens
from dataserver.dataset.workers import in_processes

__all__ = [
    "IMAGE",
    "KINDS",
    "TEXT",
    "Array",
    "ArraysError",
    "BuildReport",
    "Dataset",
    "DatasetError",
    "DocumentParts",
    "Effect",
    "Filter",
    "FilterError",
    "Finding",
    "ImageRef",
    "LintReport",
    "LruCache",
    "Memory",
    "Oddity",
    "OddityReport",
    "Quarantine",
    "QuarantineError",
    "SampleDescription",
    "Scalar",
    "Shard",
    "ShardReadError",
    "ShardSizes",
    "StaleIndexError",
    "TextTokenizer",
    "TokenizedDocument",
    "TokensMissingError",
    "TokensReport",
    "build_index",
    "compile_filter",
    "count_tokens",
    "describe",
    "in_processes",
    "lint",
    "printable",
    "processes_within",
    "read_arrays",
    "usable_cores",
    "usable_memory",
    "write_arrays",
]
