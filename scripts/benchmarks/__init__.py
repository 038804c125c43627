"""What all benchmarks share: rows of a table with their verdicts, and times scaled to the reference machine."""
