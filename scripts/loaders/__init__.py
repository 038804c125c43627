"""Loaders side by side: each a program of its own that decodes the same shards, for `scripts/bench_serving.py`."""
