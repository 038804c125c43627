"""The grid of processes that a job asks for, and the process groups between them."""
