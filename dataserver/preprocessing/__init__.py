"""Bytes in, arrays out: decoding, resizing, patches, tokens."""

from dataserver.preprocessing.digest import content_digest
from dataserver.preprocessing.images import ImageShape, decode_patches, silence_pillow_warnings
from dataserver.preprocessing.layout import TensorSpec, UnknownTensorError, total_bytes, view_tensors
from dataserver.preprocessing.sequences import TokenCountError
from dataserver.preprocessing.tokens import (
    BYTES,
    SPECIAL_TOKENS,
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerError,
    check_tokenizer,
    count_dataset_tokens,
    load_tokenizer,
    tokenizer_spec,
)
from dataserver.preprocessing.views import PreparedView, Validity, prepare_view

__all__ = [
    "BYTES",
    "SPECIAL_TOKENS",
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "ImageShape",
    "PreparedView",
    "TensorSpec",
    "TokenCountError",
    "Tokenizer",
    "TokenizerError",
    "UnknownTensorError",
    "Validity",
    "check_tokenizer",
    "content_digest",
    "count_dataset_tokens",
    "decode_patches",
    "load_tokenizer",
    "prepare_view",
    "silence_pillow_warnings",
    "tokenizer_spec",
    "total_bytes",
    "view_tensors",
]
