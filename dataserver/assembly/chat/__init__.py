"""Conversations: rendered by a tokenizer's own chat template, and made ids, some to be learned."""
