"""The trainer: configuration, checkpoints and the step loop around the disaggregated runtime."""
