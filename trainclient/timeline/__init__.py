"""What a step took, beside what was planned."""
