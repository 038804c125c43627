"""Clips and videos of benchmarks: files, and the loops that servers stand beside."""
