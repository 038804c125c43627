"""Time and memory of sequence-parallel groups (FlexSP, arXiv 2412.01523, section 3.2, eq. 11-13), in integers."""

from dataclasses import dataclass

import numpy as np

from dataserver.planning import I64

MAX_TOKENS = 1 << 22
"""Longest sequence: no time of one batch overflows int64."""


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Costs of one model on one cluster, in integers, for groups of `degrees` devices."""

    name: str
    num_devices: int
    degrees: tuple[int, ...]
    """Powers of two, ascending without gaps."""
    device_tokens: int
    """Tokens that a device of any group holds."""
    quadratic_fs: int
    token_ps: tuple[int, ...]
    """For each degree: picoseconds of device time per token, computing and exchanging."""
    fixed_ns: int

    @property
    def cluster_tokens(self) -> int:
        """Tokens that a microbatch holds at most."""
        return self.device_tokens * self.num_devices

    def times_ns(self, lengths: I64, squares: I64 | None = None) -> I64:
        """Time of each sequence in a group of each degree (eq. 12 and 13 without beta1).

        Args:
            lengths: int64 [n], tokens, at most MAX_TOKENS.
            squares: int64 [n], what attention grows with: the squares of the tokens of the samples that are packed into
                each sequence; without it, each is one sample.

        Returns:
            int64 [n, degrees], nanoseconds.
        """
        thousands, rest = np.divmod(lengths * lengths if squares is None else squares, 1_000)
        quadratic = thousands * self.quadratic_fs // 1_000 + rest * self.quadratic_fs // 1_000_000
        linear = lengths[:, None] * np.array(self.token_ps, np.int64) // 1_000
        times: I64 = (quadratic[:, None] + linear) // np.array(self.degrees, np.int64)
        return times

    def floors(self, lengths: I64) -> I64:
        """For each sequence the index of the smallest degree whose group holds it. int64 [n].

        Raises:
            ValueError: a sequence is empty, or longer than the largest group holds.
        """
        limit = min(MAX_TOKENS, self.device_tokens * self.degrees[-1])
        wrong = np.flatnonzero((lengths < 1) | (lengths > limit))
        if len(wrong):
            raise ValueError(
                f"sequence {wrong[0]} has {lengths[wrong[0]]} tokens; {self.name} on {self.num_devices} devices holds 1"
                f" to {limit} in a group of {self.degrees[-1]} ({self.device_tokens} per device): filter or split it,"
                " or add devices"
            )
        limits = self.device_tokens * np.array(self.degrees, np.int64)
        return np.searchsorted(limits, lengths).astype(np.int64)
