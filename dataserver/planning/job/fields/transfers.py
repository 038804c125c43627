"""How long rows take from one module, or stage, to the next."""

from fractions import Fraction
from typing import Annotated, Self

from pydantic import Field, model_validator

from dataserver.planning.job.fields.values import DecimalString, Name, SpecModel

MAX_BYTES_PER_NS = 10**6
"""Fastest link that a job may state, a petabyte a second."""


class Transfer(SpecModel):
    """The transfer of a microbatch's rows between two modules, or between the pipeline stages of one.

    It takes `latency_ns` + rows x `row_bytes` / `bytes_per_ns`, rounded up; the gradients take the same time on the way
    back. Transfers neither share a link nor delay computing: each one starts as soon as its rows are ready.
    """

    source: Name
    """Module whose output moves: an encoder, the backbone to a generator, or a module in several stages."""
    target: Name
    """Module that receives it: the backbone from an encoder, or a generator; or `source` itself, for the transfers
    between its pipeline stages, whose rows are the tokens or patches of the microbatch, including padding."""
    latency_ns: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Nanoseconds of a transfer that do not depend on the number of rows."""
    bytes_per_ns: DecimalString
    """Bytes that a transfer moves in a nanosecond (1 is 1 GB/s): from 0.001 to 10^6, with at most three decimals.
    Colocated: for everything that a node sends, or receives, at the same time; if all ranks are on one node, for a
    rank."""
    row_bytes: Annotated[int, Field(ge=0, le=2**24)]
    """Bytes of one row: its width x bytes of a number."""

    @property
    def name(self) -> str:
        """Name of the transfer in messages."""
        return f"the transfer from {self.source} to {self.target}"

    @property
    def bytes_per_us(self) -> int:
        """The bandwidth as an integer."""
        return int(Fraction(self.bytes_per_ns) * 1000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        bandwidth = Fraction(self.bytes_per_ns)
        if not 0 < bandwidth <= MAX_BYTES_PER_NS or (bandwidth * 1000).denominator > 1:
            raise ValueError(
                f"{self.name} has bytes_per_ns {self.bytes_per_ns}; from 0.001 to {MAX_BYTES_PER_NS}, with at most "
                "three decimals, is required: 1 is 1 GB/s"
            )
        return self
