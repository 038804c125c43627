"""A plan, what each rank sees of it, and its compact form."""
