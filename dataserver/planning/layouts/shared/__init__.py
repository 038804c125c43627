"""What several layouts share."""
