"""What several layouts use."""
