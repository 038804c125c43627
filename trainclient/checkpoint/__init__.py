"""Checkpoints: what they hold, and the folder they lie in."""
