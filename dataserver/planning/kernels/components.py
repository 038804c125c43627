"""What the kernels over placements share: the costs of a problem, and the sequences in their slots."""

from typing import NamedTuple

import numpy as np

from dataserver.planning import I64
from dataserver.planning.kernels.compiler import part


class Costs(NamedTuple):
    """What a placement of s sequences depends on (`placing.PlacementProblem`). A row is an encoder, the backbone, or a
    generator, in this order; r rows in all."""

    own: I64
    """int64 [r, s + 1]: forward time of each sequence in its component's node of the row, in a stage of the backbone;
    of a padded backbone that of its largest sample. The last column is an empty slot."""
    base: I64
    """int64 [r]: forward time of a microbatch beside its sequences."""
    percent: I64
    """int64 [r]: backward time in percent of the forward time."""
    items: I64
    """int64 [s + 1]: samples of each sequence, where the backbone pads them to the largest; [0] where it does not."""
    need: I64
    """int64 [r, s + 1]: memory of each sequence, of its largest sample if padded; [0, 0] where there is no limit."""
    budget: I64
    """int64 [r]: memory of a rank of the backbone, of a component in the others; -1 for no limit. [0] where no row has
    one."""
    window: I64
    """int64 [r]: consecutive microbatches, or waves, that must fit the memory together."""
    in_flight: I64
    """int64 [nodes]: microbatches that each encoder, each backbone stage, and each generator hold at most; never rising
    from one to the next in the joined pipeline."""
    transfer: I64
    """int64 [r]: time from an encoder to the backbone, from a backbone stage to the next, from the backbone to a
    generator."""
    transfer_back: I64
    """int64 [r]: of gradients on the same way; 0 where none return."""
    encoders: int
    """Number of encoders, whose rows come before the backbone's."""
    ranks_per_component: int
    """Backbone ranks of a component; components are consecutive."""
    whole: bool
    """Whether encoders run on the first stage of their rank of the backbone; components are single ranks then."""
    images: I64
    """int64 [s + 1]: 1 for each sequence with images, where all ranks of a wave must have some or none; else [0]."""


class Slots(NamedTuple):
    """Which sequence stands in each slot, and what that takes; a search changes these arrays."""

    at: I64
    """int64 [ranks, waves, slots]: the sequence in each slot, -1 for none."""
    time: I64
    """int64 [r, ranks, waves]: forward time of each microbatch in each row; in the backbone with what it costs beside
    its sequences."""
    used: I64
    """int64 [r, ranks, waves]: its memory; [0, 0, 0] where there is no limit."""


def slots_of(at: I64, costs: Costs) -> Slots:
    """The state of a placement, for `fill` to begin with; `at` is part of it and changes with it. Not compiled."""
    ranks, waves, _ = at.shape
    time = np.empty((len(costs.base), ranks, waves), np.int64)
    return Slots(at, time, np.empty((len(costs.budget), ranks, waves), np.int64))


@part
def fill(slots: Slots, costs: Costs) -> None:
    """Sum up what the sequences take that stand in the slots."""
    at, time, used = slots.at, slots.time, slots.used
    for rank in range(at.shape[0]):
        for wave in range(at.shape[1]):
            for row in range(len(time)):
                time[row, rank, wave] = _sum(costs.own, costs, row, at[rank, wave])
            time[costs.encoders, rank, wave] += costs.base[costs.encoders]
            for row in range(len(used)):
                used[row, rank, wave] = _sum(costs.need, costs, row, at[rank, wave])


@part
def _sum(values: I64, costs: Costs, row: int, held: I64) -> int:
    """The values of the sequences of a microbatch together; padded, the largest for each item."""
    total = 0
    if row == costs.encoders and len(costs.items):
        items, largest = 0, 0
        for sequence in held:
            if sequence >= 0:
                items += costs.items[sequence]
                largest = max(largest, values[row, sequence])
        return items * largest
    for sequence in held:
        total += values[row, sequence]
    return total


@part
def exchange(
    slots: Slots, costs: Costs, rank: int, wave: int, slot: int, other: int, other_wave: int, other_slot: int
) -> None:
    """Exchange the contents of two slots; doing it twice changes nothing."""
    at = slots.at
    here, there = at[rank, wave, slot], at[other, other_wave, other_slot]
    at[rank, wave, slot], at[other, other_wave, other_slot] = there, here
    for row in range(len(costs.base)):
        if row == costs.encoders and len(costs.items):
            base = costs.base[row]
            slots.time[row, rank, wave] = base + _sum(costs.own, costs, row, at[rank, wave])
            slots.time[row, other, other_wave] = base + _sum(costs.own, costs, row, at[other, other_wave])
        else:
            change = costs.own[row, there] - costs.own[row, here]  # column -1, the last, is an empty slot's
            slots.time[row, rank, wave] += change
            slots.time[row, other, other_wave] -= change
    for row in range(len(slots.used)):
        if row == costs.encoders and len(costs.items):
            slots.used[row, rank, wave] = _sum(costs.need, costs, row, at[rank, wave])
            slots.used[row, other, other_wave] = _sum(costs.need, costs, row, at[other, other_wave])
        else:
            change = costs.need[row, there] - costs.need[row, here]
            slots.used[row, rank, wave] += change
            slots.used[row, other, other_wave] -= change


@part
def move(slots: Slots, rank: int, first: int, second: int, shift: bool) -> None:
    """Exchange two microbatches of a rank or, with `shift`, take one out at `first` and insert it at `second`.

    Moving from `second` to `first` undoes it.
    """
    at, time, used = slots.at, slots.time, slots.used
    step = 1 if second > first else -1
    position = first
    while position != second:
        target = position + step if shift else second
        for m in range(at.shape[2]):
            at[rank, position, m], at[rank, target, m] = at[rank, target, m], at[rank, position, m]
        for row in range(len(time)):
            time[row, rank, position], time[row, rank, target] = time[row, rank, target], time[row, rank, position]
        for row in range(len(used)):
            used[row, rank, position], used[row, rank, target] = used[row, rank, target], used[row, rank, position]
        position = target


@part
def _with_images(slots: Slots, costs: Costs, rank: int, wave: int) -> int:
    """Sequences with images in a microbatch."""
    held = 0
    for sequence in slots.at[rank, wave]:
        held += costs.images[sequence]  # the last one is an empty slot's
    return int(held)


@part
def exchange_keeps_parity(
    slots: Slots, costs: Costs, rank: int, wave: int, slot: int, other: int, other_wave: int, other_slot: int
) -> bool:
    """Whether both microbatches keep having images, or none, when two slots are exchanged."""
    if not len(costs.images):
        return True
    here, there = costs.images[slots.at[rank, wave, slot]], costs.images[slots.at[other, other_wave, other_slot]]
    if here == there:
        return True
    gives = _with_images(slots, costs, rank, wave), _with_images(slots, costs, other, other_wave)
    return bool(gives[0] > here and gives[1] > there)


@part
def move_keeps_parity(slots: Slots, costs: Costs, rank: int, first: int, second: int, shift: bool) -> bool:
    """Whether every microbatch that `move` puts in another wave has images just as the one that was there."""
    if not len(costs.images):
        return True
    has = _with_images(slots, costs, rank, first) > 0
    step = (1 if second > first else -1) if shift else second - first
    position = first
    while position != second:
        position += step
        if (_with_images(slots, costs, rank, position) > 0) != has:
            return False
    return True


@part
def excess_of(slots: Slots, costs: Costs, row: int, rank: int, first: int, last: int) -> int:
    """Memory that one row lacks around waves `first` to `last`: the backbone's on the rank, another's on the component.

    One pass over the windows that hold one of these waves.
    """
    if costs.budget[row] < 0:
        return 0
    start, count = rank, 1
    if row != costs.encoders:
        start, count = rank - rank % costs.ranks_per_component, costs.ranks_per_component
    used, waves = slots.used[row, start : start + count], slots.used.shape[2]
    size = min(costs.window[row], waves)
    # total: memory of the waves from k - size + 1, but no earlier than `begin`, to k
    begin, most, total = max(0, first - size + 1), 0, 0
    for k in range(begin, min(last + size, waves)):
        for r in range(count):
            total += used[r, k]
            if k >= begin + size:
                total -= used[r, k - size]
        most = max(most, total)
    return int(max(0, most - costs.budget[row]))


@part
def excess(slots: Slots, costs: Costs, rank: int, first: int, last: int) -> int:
    """Memory that a rank's microbatches `first` to `last`, and those waves of its component, lack over all rows."""
    lacking = 0
    for row in range(len(costs.budget)):
        lacking += excess_of(slots, costs, row, rank, first, last)
    return lacking
