"""The planner: pure functions from metadata to plans. Imports nothing else of this project and does no I/O."""
