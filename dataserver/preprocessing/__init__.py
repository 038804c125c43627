"""Bytes in, arrays out: decoding, resizing, patches, tokens."""

from dataserver.preprocessing.codecs import ImageShape, decode_patches, silence_pillow_warnings, undecodable
from dataserver.preprocessing.digest import content_digest
from dataserver.preprocessing.sequences import TokenCountError
from dataserver.preprocessing.tensors import TensorSpec, UnknownTensorError, total_bytes, view_tensors
from dataserver.preprocessing.tokens import (
    BYTES,
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    TokenizerError,
    check_tokenizer,
    load_tokenizer,
    tokenizer_spec,
)
from dataserver.preprocessing.views import PreparedView, Validity, prepare_view

__all__ = [
    "BYTES",
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
    "decode_patches",
    "load_tokenizer",
    "prepare_view",
    "silence_pillow_warnings",
    "tokenizer_spec",
    "total_bytes",
    "undecodable",
    "view_tensors",
]
