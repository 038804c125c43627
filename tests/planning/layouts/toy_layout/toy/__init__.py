"""A toy layout: every rank runs its sequences, dealt out in turn, in one phase."""
