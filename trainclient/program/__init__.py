"""The operation list of a stage, as the planner's simulator scored it, and what runs it."""
