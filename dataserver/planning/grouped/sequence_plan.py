"""What the sequence-parallel planner decides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Devices that share each of their sequences, and run them one after the other."""

    first_rank: int
    """A multiple of the degree: a group no larger than a node lies inside one."""
    degree: int
    """Number of devices, a power of two."""
    sequences: tuple[int, ...]
    """Indices into the batch's lengths, longest first. Empty: the ranks only take part in what the cluster does
    together."""
    time_ns: int
    """Time of the sequences, without the microbatch's fixed time."""

    @property
    def ranks(self) -> range:
        """The devices."""
        return range(self.first_rank, self.first_rank + self.degree)


@dataclass(frozen=True, slots=True)
class GroupedMicrobatch:
    """Sequences that run at once, on groups that make up the whole cluster."""

    groups: tuple[SequenceGroup, ...]
    """By rank, largest degree first."""
    time_ns: int
    """The last group's end, with the microbatch's fixed time."""

    @property
    def composition(self) -> tuple[int, ...]:
        """Degrees of the groups, largest first."""
        return tuple(group.degree for group in self.groups)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One batch on one cluster."""

    microbatches: tuple[GroupedMicrobatch, ...]
    time_ns: int
    """Sum over the microbatches."""
    bound_ns: int
    """No plan of this cost model takes less."""
