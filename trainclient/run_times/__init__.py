"""Where the time of a run goes, and what would save some of it."""
