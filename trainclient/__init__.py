"""Runs beside the GPUs: the stream client and the disaggregated trainer."""
