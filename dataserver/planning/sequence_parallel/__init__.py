"""Sequences spread over sequence-parallel groups of different degrees (FlexSP, arXiv 2412.01523)."""
