"""Rows between the processes of two modules: routes, stamps, point-to-point transfers. It knows nothing of models."""
