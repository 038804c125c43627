"""Where plans come from, as metrics count them."""

from enum import StrEnum


class PlanSource(StrEnum):
    """Where the plan of a step comes from, in a server that has peers."""

    OWN = "own"
    """Made here, because no other server owns the step; not counted if another server asked for it before."""
    FETCHED = "fetched"
    """Fetched from the server that owns the step."""
    LATE = "late"
    """Made here, because its owner did not answer in time."""
    UNREACHABLE = "unreachable"
    """Made here, because its owner could not be reached, or fell silent."""
    REFUSED = "refused"
    """Made here, because its owner cannot plan the job, or did not say why not."""
    WRONG = "wrong"
    """Made here, because what its owner answered was not right."""
