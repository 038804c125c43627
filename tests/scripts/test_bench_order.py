"""The figures of orders: a window that slides needs bytes evenly, and mixes as well as windows with edges."""

from bench_order import neighbours, read, spread
from benchmarks.shuffles import SHUFFLES, Shape


def test_a_sliding_window_reads_evenly_and_mixes_as_well() -> None:
    shape = Shape(24, 2000, 6, 512, 3)
    found = {name: shuffle(shape) for name, shuffle in SHUFFLES.items()}
    assert len({len(order) for order in found.values()}) == 1
    edges, slides, _, buffered = found.values()
    assert read(slides, shape)[0] <= 2.5 < 10 < read(edges, shape)[0]
    assert read(slides, shape)[1] <= 1.0
    assert 0.85 < spread(slides, shape) / spread(edges, shape) < 1.15
    assert 0.8 < neighbours(slides, shape) / neighbours(edges, shape) < 1.25
    assert neighbours(buffered, shape) > 3 * neighbours(slides, shape)
