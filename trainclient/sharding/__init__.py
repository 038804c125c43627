"""How the data-parallel ranks of a module share its parameters."""
