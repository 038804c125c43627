"""Compiled search for a placement that the memory holds."""

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.kernels.compiler import kernel, part
from dataserver.planning.kernels.components import (
    Costs,
    Slots,
    excess,
    excess_of,
    exchange,
    exchange_keeps_parity,
    fill,
)


def fit_placement(slots: Slots, costs: Costs, budget: int, at_once: int, state: I64) -> tuple[I64, bool]:
    """Exchange slots until every microbatch fits the memory of every row.

    Takes the first microbatch that lacks memory and the exchange of one of its slots that leaves the least lacking, the
    first of several; a microbatch for which none helps is passed over. A placement that fits stays as it is.

    Args:
        slots: the placement, changed in place, as of `slots_of` at first.
        costs: with needs and budgets.
        budget: exchanges that may be tried.
        at_once: exchanges tried in this call, about; the first one only adds up what microbatches need.
        state: int64 [10], where to go on, changed in place: the microbatch, ranks x waves behind the last; exchanges
            tried so far; whether one was carried out since the first microbatch; and what `_best_exchange` goes on
            from. First ranks x waves, 0, 1, and zeros.

    Returns:
        int64 [rows]: what is still lacking, zeros if all fits; and whether there is something left to try.
    """
    lacking = np.zeros(len(costs.budget), np.int64)
    left = _fit(slots, costs, lacking, np.empty(len(lacking), np.bool_), budget, at_once, state)
    return lacking, bool(left)


@kernel
def _fit(slots: Slots, costs: Costs, lacking: I64, lacks: Bool, budget: int, at_once: int, state: I64) -> bool:
    """`fit_placement`, with zeros for what is lacking, and space for the rows that lack memory."""
    ranks, waves, _ = slots.at.shape
    place, tried, changed, found = state[0], state[1], state[2], state[3:]
    most = tried + at_once
    if changed and tried == 0:
        fill(slots, costs)
        state[0] = state[2] = 0
        return True
    while place < ranks * waves or (changed and tried < budget):
        if place == ranks * waves:
            place, changed = 0, 0
        rank, wave = divmod(place, waves)
        while _is_begun(found) or (tried < budget and excess(slots, costs, rank, wave, wave)):
            if tried >= most:
                state[0], state[1], state[2] = place, tried, changed
                return True
            looked, better = _best_exchange(slots, costs, lacks, rank, wave, found, most - tried)
            tried += looked
            if _is_begun(found):
                continue
            if not better:
                break
            changed = 1
        place += 1
    for row in range(len(lacking)):
        for rank in range(ranks):
            for wave in range(waves):
                lacking[row] += excess_of(slots, costs, row, rank, wave, wave)
    return False


@part
def _is_begun(found: I64) -> bool:
    return bool(found[0] or found[1])


@part
def _best_exchange(
    slots: Slots, costs: Costs, lacking: Bool, rank: int, wave: int, found: I64, at_once: int
) -> tuple[int, bool]:
    """Carry out the exchange with a slot of this microbatch that leaves least lacking in both places.

    Only what needs less of the memory that lacks here is tried in the place of a sequence. After about `at_once` it
    pauses: `found` then holds the slot here and the rank there to go on with, which are not both 0, the best change
    of what lacks, and the slots of that exchange; before and behind it zeros.

    Returns:
        How many were tried, and whether one of them helped.
    """
    ranks, waves, width = slots.at.shape
    # `best`: change of the excess in both places, below 0 where an exchange helps; `chosen`: slot here, then rank, wave
    # and slot there.
    before, tried, best = excess(slots, costs, rank, wave, wave), 0, found[2]
    chosen = (found[3], found[4], found[5], found[6])
    for row in range(len(lacking)):
        lacking[row] = excess_of(slots, costs, row, rank, wave, wave) > 0
    for slot in range(found[0], width):
        if slots.at[rank, wave, slot] < 0:
            continue
        for other in range(found[1] if slot == found[0] else 0, ranks):
            if tried >= at_once:
                found[0], found[1], found[2] = slot, other, best
                found[3], found[4], found[5], found[6] = chosen
                return tried, False
            for other_wave in range(waves):
                if other == rank and other_wave == wave:
                    continue
                there = -1
                for other_slot in range(width):
                    tried += 1
                    if not _relieves(
                        costs, lacking, slots.at[rank, wave, slot], slots.at[other, other_wave, other_slot]
                    ):
                        continue
                    if not exchange_keeps_parity(slots, costs, rank, wave, slot, other, other_wave, other_slot):
                        continue
                    if there < 0:
                        there = excess(slots, costs, other, other_wave, other_wave)
                    exchange(slots, costs, rank, wave, slot, other, other_wave, other_slot)
                    after = excess(slots, costs, rank, wave, wave) + excess(slots, costs, other, other_wave, other_wave)
                    exchange(slots, costs, rank, wave, slot, other, other_wave, other_slot)  # undone
                    if after - before - there < best:
                        best, chosen = after - before - there, (slot, other, other_wave, other_slot)
                    if after == 0:
                        exchange(slots, costs, rank, wave, slot, other, other_wave, other_slot)
                        found[:] = 0
                        return tried, True
    found[:] = 0
    if best < 0:
        exchange(slots, costs, rank, wave, chosen[0], chosen[1], chosen[2], chosen[3])
    return tried, best < 0


@part
def _relieves(costs: Costs, lacking: Bool, here: int, there: int) -> bool:
    """Whether a sequence needs less than another in a row that lacks memory."""
    row = 0
    while row < len(lacking) and not (lacking[row] and costs.need[row, there] < costs.need[row, here]):
        row += 1
    return row < len(lacking)
