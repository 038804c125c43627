"""Rows of the planner's benchmark, one module for each part."""
