"""Conversations: rendered by a tokenizer's own chat template, and made ids of which some are learned."""
