"""Recycled memory: never while anything looks at it, and always afterwards."""

import gc
import mmap
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainclient.stream.buffers import ALIGNMENT, MAPPED_BYTES, SPARE_TAKES, BufferPool, aligned_block, size_class

KEEP = 1 << 20


def views_of(lease: np.ndarray, kind: int) -> object:
    """One of the many ways to keep looking at a buffer."""
    words = lease[: len(lease) // 8 * 8].view("<i4").reshape(2, -1)
    return [
        lambda: lease[3:],
        lambda: words.T,
        lambda: words[:, 1:][None, ...],
        lambda: memoryview(words)[:1],
        lambda: torch.from_numpy(words),
        lambda: torch.from_numpy(lease[5:])[2:].view(torch.int8),
        lambda: torch.frombuffer(lease, dtype=torch.uint8),
        lambda: np.asarray(torch.from_numpy(words)),
        lambda: np.from_dlpack(torch.from_numpy(lease)),
        lambda: lease.data,
    ][kind]()


NUM_KINDS = 10


def content(view: object) -> set[int]:
    array = view.numpy() if isinstance(view, torch.Tensor) else np.asarray(view)
    return set(np.ascontiguousarray(array).view(np.uint8).ravel().tolist())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(16, 40_000), st.integers(0, NUM_KINDS - 1), st.integers(0, 5)), min_size=1, max_size=30
    )
)
def test_live_views_are_never_overwritten(actions: list[tuple[int, int, int]]) -> None:
    pool = BufferPool(KEEP)
    held: list[tuple[int, object]] = []
    for mark, (nbytes, kind, drop) in enumerate(actions):
        lease = pool.take(nbytes)
        lease[:] = mark
        held.append((mark, views_of(lease, kind)))
        del lease
        if drop < len(held):
            del held[drop]
        for expected, view in held:
            assert content(view) == {expected}


def test_a_block_comes_back_when_the_last_view_dies() -> None:
    pool = BufferPool(KEEP)
    lease = pool.take(10_000)
    address = lease.ctypes.data
    tensor = torch.from_numpy(lease[64:128].view(np.float32))
    del lease
    assert pool.idle_bytes == 0
    del tensor
    assert pool.idle_bytes == size_class(10_000)
    assert pool.take(9_900).ctypes.data == address


def test_returned_from_another_thread_and_by_the_collector() -> None:
    pool = BufferPool(KEEP)
    box = [pool.take(5000)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert pool.idle_bytes == size_class(5000)
    cycle: list[object] = [pool.take(5000)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.idle_bytes == size_class(5000)


def test_idle_memory_is_bounded() -> None:
    pool = BufferPool(100_000)
    held = [pool.take(40_000) for _ in range(8)]
    held.clear()
    assert pool.idle_bytes <= 100_000
    large = BufferPool(0)
    held = [large.take(1_000_000) for _ in range(4)]
    held.clear()
    assert large.idle_bytes == 2 * size_class(1_000_000)


def test_a_smaller_block_makes_room_for_a_larger_one() -> None:
    pool = BufferPool(KEEP)
    held = [pool.take(nbytes) for nbytes in (8192, 16384, 8192)]
    held.clear()
    larger = pool.take(12288)
    assert pool.idle_bytes == 2 * 8192, "16,384 bytes fit"
    del larger
    larger = pool.take(40_000)
    assert pool.idle_bytes == 16384 + 8192
    del larger
    held = [pool.take(30_000), pool.take(30_000)]
    assert pool.idle_bytes == 16384


def test_blocks_that_no_take_needed_are_dropped() -> None:
    """A queue that was full once leaves nothing behind but what goes on being used."""
    pool = BufferPool(100 << 20)
    held = [pool.take(2 << 20) for _ in range(10)]
    held.clear()
    assert pool.idle_bytes == 20 << 20
    for _ in range(2 * SPARE_TAKES):
        both = pool.take(2 << 20), pool.take(2 << 20)
        del both
    assert pool.idle_bytes == 2 * (2 << 20)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is counted in /proc")
def test_dropped_blocks_go_back_to_the_system_whatever_the_allocator_keeps() -> None:
    line = (
        "from dataserver.allocator import cache_freed_memory; cache_freed_memory()\n"
        "from trainclient.stream.buffers import BufferPool\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "pool, before = BufferPool(0), resident()\n"
        "held = [pool.take(16 << 20) for _ in range(8)]\n"
        "for lease in held: lease[:] = 1\n"
        "del lease; full = resident(); held.clear(); pool.idle_bytes\n"
        "print(full - before, resident() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    full, left = map(int, done.stdout.split())
    assert full >= 8 * (16 << 20)
    assert left <= 3 * (16 << 20)


def test_a_large_block_is_not_spent_on_a_small_microbatch() -> None:
    pool = BufferPool(10 << 20)
    pool.take(5 << 20)
    small = pool.take(10)
    assert pool.idle_bytes == 5 << 20
    assert small.nbytes == 10


@given(st.integers(0, 1 << 40))
def test_size_classes_waste_at_most_an_eighth(nbytes: int) -> None:
    assert nbytes <= size_class(nbytes) <= max(4096, nbytes + nbytes // 8)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 100_001])
def test_alignment(nbytes: int) -> None:
    lease = BufferPool(KEEP).take(nbytes)
    assert len(lease) == nbytes
    assert lease.ctypes.data % ALIGNMENT == 0
    assert lease.flags.writeable


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses the advice, as any that it does not know."""
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9_999)
    assert len(aligned_block(MAPPED_BYTES)) == MAPPED_BYTES


def test_blocks_come_from_the_allocator() -> None:
    asked = []
    pool = BufferPool(KEEP, lambda nbytes: asked.append(nbytes) or aligned_block(nbytes))
    pool.take(5000)
    pool.take(5000)
    assert asked == [size_class(5000)]


def test_blocks_are_kept_and_chosen_to_the_byte() -> None:
    classes = sorted({4096, *(eighths << i for i in range(9, 30) for eighths in range(8, 16))})
    for nbytes in [*range(1, 1 << 17, 509), *(size + more for size in classes[:120] for more in (-1, 0, 1))]:
        assert size_class(nbytes) == next(size for size in classes if size >= nbytes), nbytes
    pool = BufferPool(3 * 4096)
    held = [pool.take(1) for _ in range(4)]
    assert pool.idle_bytes == 0
    del held[3]
    assert pool.idle_bytes == 4096
    del held[2], held[1]
    assert pool.idle_bytes == 3 * 4096
    held.clear()
    assert pool.idle_bytes == 3 * 4096
    pool = BufferPool(1 << 20)
    blocks = {size: pool.take(size) for size in (4096, 8192, 12288)}
    places = {size: block.ctypes.data for size, block in blocks.items()}
    blocks.clear()
    assert pool.take(4097).ctypes.data == places[8192], "the smallest that fits"
    pool = BufferPool(1 << 20)
    large = pool.take(8192)
    place = large.ctypes.data
    del large
    small = pool.take(1)
    assert (small.ctypes.data, pool.idle_bytes) == (place, 0), "twice the class is not too large"
    pool = BufferPool(1 << 20)
    large = pool.take(8193)
    assert size_class(8193) == 9216
    del large
    kept = pool.take(4096)
    assert (len(kept), pool.idle_bytes) == (4096, 9216), "more than twice is"
    with pytest.raises(ValueError, match="keep_bytes is -1; 0 or more bytes are required"):
        BufferPool(-1)
    BufferPool(0)
