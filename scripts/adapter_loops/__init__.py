"""Training loops of other frameworks, each over a loader of its own and over ours, for `scripts/bench_adapters.py`."""
