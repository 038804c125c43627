"""Rows as one module hands them to another."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from trainclient.upload import upload


class RowCountError(ValueError):
    """Rows that are not as many as their items have; the message is the end of a sentence about a module."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of k items, one item after the other."""

    values: Tensor
    """[n, width] on the device of the computation."""
    valid: Tensor
    """bool [k] on the CPU: False for items that must not be learned from, such as images that cannot be decoded."""
    offsets: Tensor | None
    """int64 [k + 1] on the CPU: first row of each item, and the end. None between chunks of one module, where the items
    are those of the view."""

    @classmethod
    def of_items(cls, values: Tensor, valid: Tensor, offsets: Tensor) -> Self:
        """Rows [n, width] of items at `offsets` (integers [k + 1]), where only valid ones are learned from.

        The rows of the others leave as zeros, and their gradients are zero whatever comes back.

        Raises:
            RowCountError: there are more or fewer rows.
        """
        offsets = offsets.to(torch.int64)
        if len(values) != int(offsets[-1]):
            raise RowCountError(
                f"made {len(values)} rows for {len(valid)} items that have {int(offsets[-1])} together; it must make "
                "as many as the plan counts (for images patches / merge^2 each)"
            )
        row_valid = upload(torch.from_numpy(np.repeat(valid.numpy(), np.diff(offsets.numpy())))[:, None], values.device)
        return cls(values.masked_fill(~row_valid, 0), valid, offsets)

    def valid_of(self, offsets: Tensor) -> Tensor:
        """The validity of the items of a view, given where they lie.

        Args:
            offsets: integers [k + 1], the first row of each item and the end.

        Returns:
            bool [k].

        Raises:
            ValueError: other items arrived.
        """
        nonempty = offsets.diff() > 0
        starts = offsets[:-1][nonempty].to(torch.int64)
        if self.offsets is None or not torch.equal(self.offsets[:-1], starts):
            raise ValueError("the routing cuts rows within an item; the server's plan and view do not belong together")
        valid = torch.ones(len(offsets) - 1, dtype=torch.bool)
        valid[nonempty] = self.valid
        return valid
