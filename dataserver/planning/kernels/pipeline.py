"""Compiled loops over pipelines: the makespan of one island, and the search for a placement."""

import numpy as np

from dataserver.planning.kernels import kernel
from dataserver.planning.samples import I64, U64, Bool


@kernel
def island_makespan(
    encoder: I64, backbone: I64, generator: I64, percent: I64, in_flight: I64, clock: I64, ends: I64
) -> int:
    """Makespan of one island: c backbone ranks that share one encoder and one generator node.

    Operations are visited round by round: in round k every stage runs the forward of wave k and then the backward that
    its list has behind it (`pipeline.stage_operations`), first stages first and last stages first. So every input is
    known when it is needed and nothing is queued.

    Args:
        encoder: int64 [c, waves]: what each rank's microbatches cost in the encoder node; [0, 0] without an encoder.
        backbone: int64 [c, waves]: forward time of each microbatch in one stage.
        generator: int64 [c, waves]; [0, 0] without a generator.
        percent: int64 [3]: backward time in percent of the forward time of encoder, backbone, generator.
        in_flight: int64 [stages + 2]: microbatches that encoder, backbone stages and generator hold at most; never
            rising, those of absent modules are not read.
        clock: int64 [c, stages + 2], scratch: encoder and generator in row 0.
        ends: int64 [c, stages + 2, waves], scratch: end of every backward.
    """
    ranks, waves = backbone.shape
    has_encoder, has_generator = encoder.shape[0] > 0, generator.shape[0] > 0
    clock[:] = 0
    gate = len(in_flight) - 1
    deepest = in_flight[0] if has_encoder else in_flight[1]
    for round_ in range(waves + deepest - 1):
        if round_ < waves:
            fed = 0
            if has_encoder:
                fed = clock[0, 0]
                for i in range(ranks):
                    fed += encoder[i, round_]
                clock[0, 0] = fed
            latest = 0
            total = 0
            for i in range(ranks):
                time = fed
                step = backbone[i, round_]
                for s in range(1, gate):
                    time = max(time, clock[i, s]) + step
                    clock[i, s] = time
                latest = max(latest, time)
                if has_generator:
                    total += generator[i, round_]
            if has_generator:
                clock[0, gate] = max(clock[0, gate], latest) + total
        if has_generator:
            wave = round_ + 1 - in_flight[gate]
            if 0 <= wave < waves:
                total = 0
                for i in range(ranks):
                    total += generator[i, wave]
                clock[0, gate] += total * percent[2] // 100
                ends[0, gate, wave] = clock[0, gate]
        for s in range(gate - 1, 0, -1):
            wave = round_ + 1 - in_flight[s]
            if wave < 0 or wave >= waves:
                continue
            for i in range(ranks):
                time = clock[i, s]
                if s + 1 < gate:
                    time = max(time, ends[i, s + 1, wave])
                elif has_generator:
                    time = max(time, ends[0, gate, wave])
                time += backbone[i, wave] * percent[1] // 100
                clock[i, s] = time
                ends[i, s, wave] = time
        if has_encoder:
            wave = round_ + 1 - in_flight[0]
            if 0 <= wave < waves:
                time = clock[0, 0]
                total = 0
                for i in range(ranks):
                    time = max(time, ends[i, 1, wave])
                    total += encoder[i, wave]
                clock[0, 0] = time + total * percent[0] // 100
    return int(clock.max())


@kernel
def improve_placement(
    at: I64,
    own: I64,
    base: I64,
    percent: I64,
    present: Bool,
    ranks_per_island: int,
    in_flight: I64,
    words: U64,
    budget: int,
) -> tuple[int, int]:
    """Hill climbing on the slowest island: swaps of sequences within it or with another, and moves of its microbatches.

    A change is kept if no island that it touches becomes slower than the slowest was. Deterministic: the n-th trial is
    given by the n-th word, and the search ends after `budget` simulated islands or when the words are used up.

    Args:
        at: int64 [ranks, waves, slots], changed in place: the sequence in each slot, -1 for none.
        own: int64 [3, sequences + 1]: what each sequence costs in encoder, backbone stage, generator; the last is 0.
        base: int64 [3]: what a microbatch costs beside its sequences.
        percent: int64 [3], see `island_makespan`.
        present: bool [2]: whether there is an encoder, a generator.
        ranks_per_island: backbone ranks of one island; islands are consecutive.
        in_flight: int64 [stages + 2], see `island_makespan`.
        words: uint64 [trials], random.
        budget: islands to simulate.

    Returns:
        The makespan of the slowest island before and after.
    """
    ranks, waves, slots = at.shape
    islands = ranks // ranks_per_island
    time = _times(at, own, base, ranks_per_island)
    clock = np.zeros((ranks_per_island, len(in_flight)), np.int64)
    ends = np.zeros((ranks_per_island, len(in_flight), waves), np.int64)
    makespan = np.zeros(islands, np.int64)
    for w in range(islands):
        makespan[w] = _island(time, w, present, ranks_per_island, percent, in_flight, clock, ends)
    before = makespan.max()
    simulated = islands
    for word in words:
        if simulated >= budget:
            break
        worst = np.argmax(makespan)
        bits = np.int64(word >> np.uint64(1))
        rank = worst * ranks_per_island + bits % ranks_per_island
        bits //= ranks_per_island
        first = bits % waves
        bits //= waves
        second = bits % waves
        bits //= waves
        kind = bits % 4
        bits //= 4
        if kind >= 2:
            if first == second:
                continue
            _move(at, time, rank, first, second, kind == 3)
            now = _island(time, worst, present, ranks_per_island, percent, in_flight, clock, ends)
            simulated += 1
            if now <= makespan[worst]:
                makespan[worst] = now
            else:
                _move(at, time, rank, second, first, kind == 3)
            continue
        other = bits % ranks
        bits //= ranks
        slot, other_slot = bits % slots, bits // slots % slots
        if rank == other and first == second:
            continue
        _swap(at, time, own, rank, first, slot, other, second, other_slot)
        island = other // ranks_per_island
        now = _island(time, worst, present, ranks_per_island, percent, in_flight, clock, ends)
        simulated += 1
        there = now
        if now <= makespan[worst] and island != worst:
            there = _island(time, island, present, ranks_per_island, percent, in_flight, clock, ends)
            simulated += 1
        if now <= makespan[worst] and (there < makespan[worst] or island == worst):
            makespan[worst], makespan[island] = now, there
        else:
            _swap(at, time, own, rank, first, slot, other, second, other_slot)
    return int(before), int(makespan.max())


@kernel
def _times(at: I64, own: I64, base: I64, ranks_per_island: int) -> I64:
    """int64 [3, ranks, waves]: what each microbatch costs; what no sequence causes counts for one rank of an island."""
    ranks, waves, slots = at.shape
    time = np.zeros((3, ranks, waves), np.int64)
    for r in range(ranks):
        for k in range(waves):
            for kind in range(3):
                time[kind, r, k] = base[kind] if kind == 1 or r % ranks_per_island == 0 else 0
                for m in range(slots):
                    time[kind, r, k] += own[kind, at[r, k, m]]
    return time


@kernel
def _island(
    time: I64,
    number: int,
    present: Bool,
    ranks_per_island: int,
    percent: I64,
    in_flight: I64,
    clock: I64,
    ends: I64,
) -> int:
    """Makespan of one island of the whole job."""
    first = number * ranks_per_island
    end = first + ranks_per_island
    encoder = time[0, first:end] if present[0] else time[0, 0:0]
    generator = time[2, first:end] if present[1] else time[2, 0:0]
    return island_makespan(encoder, time[1, first:end], generator, percent, in_flight, clock, ends)


@kernel
def _swap(
    at: I64, time: I64, own: I64, rank: int, wave: int, slot: int, other: int, other_wave: int, other_slot: int
) -> None:
    """Exchange the contents of two slots; doing it twice changes nothing."""
    here, there = at[rank, wave, slot], at[other, other_wave, other_slot]
    at[rank, wave, slot], at[other, other_wave, other_slot] = there, here
    for kind in range(3):
        change = own[kind, there] - own[kind, here]
        time[kind, rank, wave] += change
        time[kind, other, other_wave] -= change


@kernel
def _move(at: I64, time: I64, rank: int, first: int, second: int, shift: bool) -> None:
    """Exchange two microbatches of a rank or, with `shift`, take one out at `first` and insert it at `second`.

    Moving from `second` to `first` undoes it. What a microbatch costs beside its sequences is the same in all of them.
    """
    step = 1 if second > first else -1
    position = first
    while position != second:
        target = position + step if shift else second
        for m in range(at.shape[2]):
            at[rank, position, m], at[rank, target, m] = at[rank, target, m], at[rank, position, m]
        for kind in range(3):
            time[kind, rank, position], time[kind, rank, target] = time[kind, rank, target], time[kind, rank, position]
        position = target
