"""Samples and images in; the tensors of one module, rank and microbatch out."""

from dataserver.assembly.chat.tokenizer import ChatTokenizer, chat_digest, image_marks, open_chat, video_timestamps
from dataserver.assembly.decoders import DECODERS, Item, fault_of, format_name
from dataserver.assembly.decoding import Coming, DecodeTask, UnreadableError
from dataserver.assembly.digest import content_digest
from dataserver.assembly.hugging_face import HuggingFaceTokenizer, TokenizerError
from dataserver.assembly.sequences import TokenCountError
from dataserver.assembly.tensors import TensorSpec, UnknownTensorError, total_bytes, view_tensors
from dataserver.assembly.tiktoken_ranks import is_ranks
from dataserver.assembly.tokens import (
    BYTES,
    ByteTokenizer,
    Tokenizer,
    check_tokenizer,
    load_tokenizer,
    tokenizer_digest,
    tokenizer_spec,
)
from dataserver.assembly.views import PreparedView, UncountedError, Validity, prepare_view

__all__ = [
    "BYTES",
    "DECODERS",
    "ByteTokenizer",
    "ChatTokenizer",
    "Coming",
    "DecodeTask",
    "HuggingFaceTokenizer",
    "Item",
    "PreparedView",
    "TensorSpec",
    "TokenCountError",
    "Tokenizer",
    "TokenizerError",
    "UncountedError",
    "UnknownTensorError",
    "UnreadableError",
    "Validity",
    "chat_digest",
    "check_tokenizer",
    "content_digest",
    "fault_of",
    "format_name",
    "image_marks",
    "is_ranks",
    "load_tokenizer",
    "open_chat",
    "prepare_view",
    "tokenizer_digest",
    "tokenizer_spec",
    "total_bytes",
    "video_timestamps",
    "view_tensors",
]
