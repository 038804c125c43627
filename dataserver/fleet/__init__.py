"""The other servers of a fleet: who is live, who owns which step, and the plans that are fetched from them."""
