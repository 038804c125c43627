"""Steps of interleaved chunks beside an encoder are estimated as they are simulated."""

from itertools import pairwise, product

import numpy as np
import pytest

from dataserver.planning.layouts.pipelined.interleaving import _taken_ahead
from dataserver.planning.layouts.pipelined.programs import interleaved_in_flight, interleaved_operations
from dataserver.planning.simulation import Pipeline, makespan_ns, stage_operations
from trainclient.orchestrate.backbones import READY
from trainclient.orchestrate.sharing import Spine

STAGE_NS = 1_200_000
"""Of a wave in all chunks of a stage, forward and backward."""


def simulated_ns(stages: int, chunks: int, waves: int, encoder_ns: int) -> int:
    """A step of equal waves, through an encoder and interleaved stages that hold what servers plan."""
    held = np.minimum(interleaved_in_flight(stages, chunks), waves * chunks)
    ahead = _taken_ahead(stages, chunks, waves, int(held[0]))
    operations = [stage_operations(min(ahead + 1, waves), waves)]
    operations += [interleaved_operations(s, stages, chunks, waves, int(held[s])) for s in range(stages)]
    both = np.full(((1 + stages) * chunks, waves), STAGE_NS // chunks, np.int64)
    both[:chunks] = 0
    both[0] = encoder_ns
    way = [0, *((1 + s) * chunks + c for c in range(chunks) for s in range(stages))]
    edges = np.array([(k, a, b) for k in range(waves) for a, b in pairwise(way)], np.int64)
    return makespan_ns(
        Pipeline(1 + stages, np.arange(1 + stages), both // 3, both - both // 3, edges, operations, chunks)
    )


def estimated_ns(stages: int, chunks: int, waves: int, encoder_ns: int, ready: float) -> float:
    """The same by the solver's formula."""
    chunk = STAGE_NS / chunks
    spine = Spine(1, waves, 1, chunk, STAGE_NS + (stages - 1) * chunk, 0, 1, STAGE_NS - chunk, ready / stages)
    return encoder_ns + spine.alone_ns + spine.steady_ns(encoder_ns, 0.0) * (waves - 1)


def test_interleaved_steps_are_estimated() -> None:
    """Encoders from half as long as a chunk to three times; without waves that are ready, a third more."""
    found, without = [], []
    for stages, chunks, turns, times in product((2, 3, 4, 8), (2, 4), (2, 8), (0.5, 1, 1.5, 2, 3)):
        waves, encoder = turns * stages, round(times * STAGE_NS / chunks)
        step = simulated_ns(stages, chunks, waves, encoder)
        found.append(estimated_ns(stages, chunks, waves, encoder, READY) / step)
        without.append(estimated_ns(stages, chunks, waves, encoder, 0) / step)
        if times <= 1:
            assert found[-1] == pytest.approx(1, rel=1e-3)
    assert 0.95 < min(found) <= max(found) < 1.16
    assert np.mean(np.abs(np.array(found) - 1) < 0.08) > 0.85
    assert np.mean(found) < 1.04
    assert max(without) > 1.3
