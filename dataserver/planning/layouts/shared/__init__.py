"""What several layouts have in common."""
