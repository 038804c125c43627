"""Shards, storage and index: input and output, no policy."""

from dataserver.dataset.cache import LruCache
from dataserver.dataset.conversion.convert import convert
from dataserver.dataset.dataset import Dataset
from dataserver.dataset.descriptions import SampleDescription, describe
from dataserver.dataset.errors import (
    CaptionError,
    DatasetError,
    FilterError,
    QuarantineError,
    ShardFinding,
    ShardReadError,
    StaleIndexError,
    TokenizingEndedError,
    TokenizingError,
    TokensMissingError,
    cannot_read,
    printable,
)
from dataserver.dataset.evictions import EvictionCounts, Evictions
from dataserver.dataset.filter_grammar import compile_filter, filter_parts
from dataserver.dataset.filters import Filter
from dataserver.dataset.index.arrays import Array, ArraysError, read_arrays, write_arrays
from dataserver.dataset.index.build import build_index
from dataserver.dataset.index.chat_batches import EncodedChat
from dataserver.dataset.index.chat_tokens import count_chats
from dataserver.dataset.index.derived import DerivedColumns, derive_columns, derive_table
from dataserver.dataset.index.numeric import ShardSizes
from dataserver.dataset.index.parts import WHOLE, Part
from dataserver.dataset.index.rules import (
    Conversations,
    IndexRules,
    KeyEnd,
    MediaMembers,
    MetadataKeys,
    MissingImages,
    OnTokenError,
    SeveralImages,
    TextOnly,
    TruncatedImages,
)
from dataserver.dataset.index.text_transforms import TransformingTokenizer
from dataserver.dataset.index.tokens import TextTokenizer, count_tokens, texts_key
from dataserver.dataset.kinds import (
    CHAT_LEFT_OUT,
    CHAT_NOT_ENDED,
    CUT_CHAT,
    KINDS,
    LONG_CHAT,
    SPLIT_DOCUMENT,
    TEXT_TRANSFORM,
    TRANSFORM,
    Effect,
)
from dataserver.dataset.lint import LintReport, lint
from dataserver.dataset.machine.cores import usable_cores
from dataserver.dataset.machine.memory import Memory, processes_within, usable_memory
from dataserver.dataset.machine.workers import Engine, in_processes
from dataserver.dataset.progress import Progress, untold
from dataserver.dataset.quarantine import Quarantine
from dataserver.dataset.shard import DocumentParts, ImageRef, Shard
from dataserver.dataset.shard_tokens import ChatParts, TokenizedDocument
from dataserver.dataset.shards.captions import OWN, CaptionSource, parse_captions
from dataserver.dataset.shards.chat import Conversation
from dataserver.dataset.shards.conversations import IMAGE_KIND, MEDIA_NAMES
from dataserver.dataset.shards.parts import IMAGE, TEXT, Scalar
from dataserver.dataset.storage.block_files import BlockFiles
from dataserver.dataset.storage.blocks import BLOCKS, Blocks
from dataserver.dataset.storage.index_mirror import publish
from dataserver.dataset.storage.io_threads import IoThreads
from dataserver.dataset.storage.needed_blocks import NEEDED_S
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece, Source
from dataserver.dataset.storage.retries import gave_up
from dataserver.dataset.storage.urls import is_url, location

__all__ = [
    "BLOCKS",
    "BLOCK_BYTES",
    "CHAT_LEFT_OUT",
    "CHAT_NOT_ENDED",
    "CUT_CHAT",
    "IMAGE",
    "IMAGE_KIND",
    "KINDS",
    "LONG_CHAT",
    "MEDIA_NAMES",
    "NEEDED_S",
    "OWN",
    "SPLIT_DOCUMENT",
    "TEXT",
    "TEXT_TRANSFORM",
    "TRANSFORM",
    "WHOLE",
    "Array",
    "ArraysError",
    "BlockFiles",
    "BlockKey",
    "Blocks",
    "CaptionError",
    "CaptionSource",
    "ChatParts",
    "Conversation",
    "Conversations",
    "Dataset",
    "DatasetError",
    "DerivedColumns",
    "DocumentParts",
    "Effect",
    "EncodedChat",
    "Engine",
    "EvictionCounts",
    "Evictions",
    "Filter",
    "FilterError",
    "ImageRef",
    "IndexRules",
    "IoThreads",
    "KeyEnd",
    "LintReport",
    "LruCache",
    "MediaMembers",
    "Memory",
    "MetadataKeys",
    "MissingImages",
    "OnTokenError",
    "Part",
    "Piece",
    "Progress",
    "Quarantine",
    "QuarantineError",
    "SampleDescription",
    "Scalar",
    "SeveralImages",
    "Shard",
    "ShardFinding",
    "ShardReadError",
    "ShardSizes",
    "Source",
    "StaleIndexError",
    "TextOnly",
    "TextTokenizer",
    "TokenizedDocument",
    "TokenizingEndedError",
    "TokenizingError",
    "TokensMissingError",
    "TransformingTokenizer",
    "TruncatedImages",
    "build_index",
    "cannot_read",
    "compile_filter",
    "convert",
    "count_chats",
    "count_tokens",
    "derive_columns",
    "derive_table",
    "describe",
    "filter_parts",
    "gave_up",
    "in_processes",
    "is_url",
    "lint",
    "location",
    "parse_captions",
    "printable",
    "processes_within",
    "publish",
    "read_arrays",
    "texts_key",
    "untold",
    "usable_cores",
    "usable_memory",
    "write_arrays",
]
