"""What several layouts use: messages along edges, and the ends of chunks."""
