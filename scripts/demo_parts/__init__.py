"""What `scripts/demo` consists of: its job, its stages, the processes that it starts, and what it shows."""
