"""Bytes in, arrays out: decoding, resizing, patches, tokens."""
