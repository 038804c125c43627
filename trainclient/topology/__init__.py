"""Which process is which, what it holds, and how the processes reach each other."""
