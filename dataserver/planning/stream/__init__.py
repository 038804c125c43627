"""Which samples a step holds, and their sizes."""
