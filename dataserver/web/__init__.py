"""The pages of `dataserver web`: JSON from a fleet and from local indexes, and a small server that gives it."""
