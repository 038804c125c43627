"""The specification of a job, its identity and its schema."""
