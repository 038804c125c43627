"""Open streams: microbatches that are prepared ahead, and handed out to their consumers."""
