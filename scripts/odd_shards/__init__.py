"""Odd and hostile shards, and what must become of their samples; `scripts/make_odd_shards.py` writes them."""
