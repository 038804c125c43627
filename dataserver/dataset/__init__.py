"""Shards, storage and index: input and output, no policy."""
