"""What ends a run that could start."""


class TrainingError(RuntimeError):
    """Training cannot go on. All processes raise it in the same step with the same message."""

    known_to_all = True
