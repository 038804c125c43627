"""What can go wrong with transforms of users."""


class TransformError(ValueError):
    """A transform cannot be used here; the message says what to change."""


class TransformUnknownError(TransformError):
    """A job asks for a transform, or a version of one, that this server does not have."""


class TransformFailedError(Exception):
    """A transform raised, or returned what it must not return: its sample is invalid."""


class TransformUnavailableError(Exception):
    """A transform took too long, had no memory, file or thread, or its process died: says nothing about the sample."""
