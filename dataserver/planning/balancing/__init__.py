"""Spreading items over bins so that the heaviest bin is light."""

from dataserver.planning.balancing.greedy import in_runs, longest_first

__all__ = ["in_runs", "longest_first"]
