"""Limits on what is tokenized, in bytes."""

from typing import Final

MAX_TOKENIZER_BYTES: Final = 256 << 20
"""Largest tokenizer file; the largest published vocabularies take about 35 MB."""

MAX_TEXT_BATCH_BYTES: Final = 16 << 20
"""UTF-8 bytes that are tokenized in one call: bounds the memory while a dataset is counted."""
