"""Mutants: small changes to the code. Some test must notice each of them."""
