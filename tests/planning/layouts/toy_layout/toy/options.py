"""The part of a job that belongs to the toy layout."""

from typing import Literal

from dataserver.planning.job.fields import BackboneOptions, ExecutionParts, OrderPolicy


class ToyOptions(BackboneOptions):
    """A backbone alone, whose ranks take the sequences in turn."""

    kind: Literal["toy"]
    """Names the layout."""
    order: OrderPolicy = OrderPolicy.DISTTRAIN
    """Turns from the first sequence on, or (`none`, the baseline) from the last one."""

    def check_modules(self, execution: ExecutionParts) -> None:
        """Refuse anything beside a backbone of one stage."""
        super().check_modules(execution)
        if len(execution.modules) > 1 or execution.modules[0].pp > 1:
            raise ValueError("found other modules or stages; a toy is a backbone of one stage alone")
