"""Blocks of objects: what servers hold of shards that lie elsewhere.

A shuffle window touches all of its shards all the time, so whoever reads one image will want its neighbours: blocks of
8 MiB are read once, before their first image is wanted, and held, in memory and on a disk, while plans need them. What
is wanted before its block is there, such as the first batch, is read by a range of its own. In a fleet each block has
an owner: the others ask that one for images, and hold none of its blocks, so that the memory of all servers adds up.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

from dataserver.dataset.storage.block_files import BlockFiles
from dataserver.dataset.storage.held_blocks import HeldBlocks
from dataserver.dataset.storage.io_threads import ThreadsOfStores
from dataserver.dataset.storage.pieces import BLOCK_BYTES, BlockKey, Piece, Source, part_of, runs
from dataserver.dataset.storage.pieces_ahead import PiecesAhead, waited_for
from dataserver.tracing import within

DEFAULT_MEMORY_BYTES: Final = 256 << 20
"""What commands have; a server has a setting."""
LOADING: Final = 8
"""Blocks of a store that are read at a time."""
MAX_QUEUED: Final = 4096
"""Blocks of a store that wait to be read; what is wanted beyond is asked for again with its next image."""
READING: Final = 32
"""Pieces of a store that are read at a time, and calls to other servers for them. These have threads of their own: what
two servers ask of each other would wait for each other's threads else."""
AHEAD_BYTES: Final = 128 << 20
"""Bytes of pieces that were read ahead and are not taken yet."""

_log = logging.getLogger(__name__)


class Owners(Protocol):
    """The other servers of a fleet, as caches."""

    def owner(self, key: BlockKey) -> Any:
        """Return who owns a block; None where this server does."""

    def fetch(self, owner: Any, pieces: Sequence[Piece]) -> list[bytes]:
        """Return pieces from the owner of their blocks. Raises OSError where it does not give them all."""


@dataclass(slots=True)
class BlockCounts:
    """What was read, and from where, since the process began."""

    store_requests: int = 0
    store_bytes: int = 0
    piece_requests: int = 0
    """Those of the requests that are for single pieces, not blocks."""
    memory_bytes: int = 0
    """Bytes that were served from blocks in memory."""
    disk_bytes: int = 0
    """The same, from blocks on the disk."""
    owner_bytes: int = 0
    """The same, from other servers."""
    owner_failures: int = 0
    """Calls to other servers that gave nothing."""

    def add(self, counts: Mapping[str, int]) -> None:
        """Add to the counts of these names."""
        for name, number in counts.items():
            setattr(self, name, getattr(self, name) + number)


class Blocks:
    """The blocks that a process holds. Thread-safe."""

    def __init__(self) -> None:
        self.counts = BlockCounts()
        self.held = HeldBlocks(DEFAULT_MEMORY_BYTES)
        self._files: BlockFiles | None = None
        self._owners: Owners | None = None
        self._lock = threading.RLock()
        """Guards the counts and what follows. A file that is collected by a thread that has it cancels what it asked
        for, which takes it again; by one that has another lock as well, so that none is taken under this one."""
        self._loading: set[BlockKey] = set()
        self._ahead = PiecesAhead(AHEAD_BYTES)
        self._loaders = ThreadsOfStores(LOADING, "blocks")
        self._readers = ThreadsOfStores(READING, "pieces")
        self._askers = ThreadsOfStores(READING, "owners")

    def configure(self, memory_bytes: int, files: BlockFiles | None = None) -> None:
        """Set how much is held."""
        self.held.resize(memory_bytes)
        self._files = files

    def use_owners(self, owners: Owners | None) -> None:
        """Ask other servers for what they own, from now on."""
        self._owners = owners

    @property
    def capacity(self) -> int:
        """Bytes of blocks that can be held: what is in memory is on the disk, too."""
        return max(self.held.most, self._files.most if self._files else 0)

    def forget(self) -> None:
        """Drop all blocks from memory."""
        self.held.clear()
        self._ahead.clear()

    def read_whole(self, key: BlockKey, source: Source, is_held: bool) -> "Future[bytes]":
        """Begin to read a block for one who reads a whole object.

        Args:
            key: the block.
            source: where it is read from.
            is_held: whether pieces of the block are wanted, too: it is taken from those that are held, or held.
        """
        if not is_held:
            return self._readers.of(key.store).submit(source.get, key.info, key.number * BLOCK_BYTES, key.num_bytes)
        with self._lock:
            self._loading.add(key)
        found = self._readers.of(key.store).submit(self._read_and_hold, key, source)
        found.add_done_callback(lambda _: self._loaded(key))
        return found

    def read(self, pieces: Sequence[Piece], for_peer: bool = False) -> list[bytes]:
        """Return pieces of objects.

        Args:
            pieces: which.
            for_peer: whether another server asks, which this one asks nothing in turn.

        Raises:
            OSError: a store does not give them.
        """
        if for_peer or self._owners is None:
            return self._read(pieces, for_peer)
        parts = [list(piece.split()) for piece in pieces]
        found = iter(self._read([part for some in parts for part in some], for_peer))
        return [next(found) if len(some) == 1 else b"".join(islice(found, len(some))) for some in parts]

    def _read(self, pieces: Sequence[Piece], for_peer: bool) -> list[bytes]:
        found: dict[int, bytes] = {}
        counts: Counter[str] = Counter()
        for number, piece in enumerate(pieces):
            data = _read_held(self.held, self._files, piece, counts)
            # What this server reads ahead it may have asked another one for, which may be the one that asks.
            ahead = None if for_peer else self._ahead.take(piece)
            data = waited_for(piece, ahead) if data is None else data
            if data is not None:
                found[number] = data
        missing = [number for number in range(len(pieces)) if number not in found]
        if missing:
            futures = self._begin([pieces[n] for n in missing], for_peer)
            for number, future in zip(missing, futures, strict=True):
                found[number] = self._result(pieces[number], future)
        self._count(**counts)
        return [found[number] for number in range(len(pieces))]

    def read_ahead(self, pieces: Sequence[Piece]) -> None:
        """Begin to read pieces that will be wanted soon, and the blocks that they lie in. What fails is said then."""
        missing, room = [], AHEAD_BYTES
        for piece in self._parts(pieces):
            if room > 0 and not self._ahead.has(piece) and not self._has(piece):
                missing.append(piece)
                room -= piece.length
        for piece, future in zip(missing, self._begin(missing, for_peer=False), strict=True):
            self._ahead.put(piece, future)

    def coming(self, pieces: Sequence[Piece]) -> "list[Future[bytes]]":
        """What is read ahead of pieces and is not here: on its way, or failed since they were last read ahead."""
        found = [(piece, self._ahead.coming(piece)) for piece in self._parts(pieces)]
        return [future for piece, future in found if future is not None and not self._has(piece)]

    def _parts(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Pieces as they are asked for: where blocks have owners, none lies in two of them."""
        return pieces if self._owners is None else [part for piece in pieces for part in piece.split()]

    def need(
        self,
        job: str,
        blocks: Iterable[tuple[BlockKey, Source]],
        behind: Iterable[tuple[BlockKey, Source]] = (),
    ) -> None:
        """Begin to read blocks that a job needs, as far as there is room, and hold on to them.

        Args:
            job: names the job; what it needed before counts no longer.
            blocks: with where each is read from; those that are needed first come first. They are asked for one by one
                while there is room. Other servers' are left to these.
            behind: what ranks may need that are behind, which is held as far as it is there and room is left.
        """
        owners = self._owners
        with self.held.needs.told(job, self.capacity) as told:
            for key, source in blocks:
                if owners is not None and owners.owner(key) is not None:
                    continue
                if not told.add(key):
                    return
                if key not in told.begun and key not in self.held and self._want_block(key, source):
                    told.begun.add(key)
            for key, _ in behind:
                if key in told or (owners is not None and owners.owner(key) is not None):
                    continue
                if self._is_held(key) and not told.add(key):
                    return

    def _begin(self, pieces: Sequence[Piece], for_peer: bool) -> "list[Future[bytes]]":
        """Begin to read pieces, those of other servers' blocks there, and the blocks of all others."""
        begun: dict[int, Future[bytes]] = {}
        groups: dict[Any, list[int]] = {}
        owners = None if for_peer else self._owners
        for number, piece in enumerate(pieces):
            owner = None if owners is None else owners.owner(piece.blocks[0])
            groups.setdefault(owner, []).append(number)
        for owner, numbers in groups.items():
            if owner is not None:
                askers = self._askers.of(pieces[numbers[0]].source.name)
                whole = askers.submit(self._from_owner, owner, [pieces[n] for n in numbers])
                begun |= {n: part_of(whole, i) for i, n in enumerate(numbers)}
        mine = {id(pieces[n]): n for n in groups.get(None, ())}
        self._want(pieces[n] for n in mine.values())
        for run in runs([pieces[n] for n in mine.values()]):
            whole = self._readers.of(run[0].source.name).submit(self._read_run, run)
            begun |= {mine[id(piece)]: part_of(whole, i) for i, piece in enumerate(run)}
        return [begun[number] for number in range(len(pieces))]

    def _result(self, piece: Piece, future: "Future[bytes]") -> bytes:
        try:
            return future.result()
        except CancelledError:
            return self._read_run([piece])[0]

    def _has(self, piece: Piece) -> bool:
        return all(map(self._is_held, piece.blocks))

    def _is_held(self, key: BlockKey) -> bool:
        return key in self.held or (self._files is not None and self._files.has(key))

    def _want(self, pieces: Iterable[Piece]) -> None:
        """Begin to read the blocks that pieces lie in."""
        sources = {key: piece.source for piece in pieces for key in piece.blocks}
        for key in sorted(sources):
            self._want_block(key, sources[key])

    def _want_block(self, key: BlockKey, source: Source) -> bool:
        """Begin to read a block that would be held. Returns whether it is read, or there already."""
        loaders = self._loaders.of(key.store)
        fits = self.held.needs.fit(key, self.capacity) and loaders.num_waiting < MAX_QUEUED
        with self._lock:
            if key in self._loading or key in self.held:
                return True
            if not fits:
                return False
            self._loading.add(key)
        with within(None):  # blocks serve many steps: whose turn it is now is not who waits for them
            loading = loaders.submit(self._load, source, key)
        loading.add_done_callback(lambda _: self._loaded(key))
        return not loading.cancelled()

    def _load(self, source: Source, key: BlockKey) -> None:
        try:
            if not self.held.needs.fit(key, self.capacity):  # nobody needs it any more
                return
            if self._files is not None and self._files.has(key):
                return
            data = source.get(key.info, key.number * BLOCK_BYTES, key.num_bytes)
            self._count(store_requests=1, store_bytes=len(data))
            self.held.put(key, data)
            if self._files is not None:
                self._files.write(key, data, self.held.needs.keys)
        except OSError as error:
            _log.debug("block %d of %s/%s cannot be read: %s", key.number, key.store, key.info.key, error)
        except Exception:  # nobody asks for what came of it
            _log.exception("block %d of %s/%s cannot be read", key.number, key.store, key.info.key)

    def _read_and_hold(self, key: BlockKey, source: Source) -> bytes:
        data = self.held.read(key, 0, key.num_bytes)
        if data is None:
            data = source.get(key.info, key.number * BLOCK_BYTES, key.num_bytes)
            self._count(store_requests=1, store_bytes=len(data))
            self.held.put(key, data)
        return data

    def _loaded(self, key: BlockKey) -> None:
        with self._lock:
            self._loading.discard(key)

    def _from_owner(self, owner: Any, pieces: Sequence[Piece]) -> list[bytes]:
        """Pieces from another server, or from the store where that does not give them."""
        assert self._owners is not None
        try:
            found = self._owners.fetch(owner, pieces)
            self._count(owner_bytes=sum(map(len, found)))
            return found
        except OSError as error:
            _log.debug("%d pieces are read from the store: %s", len(pieces), error)
            self._count(owner_failures=1)
        numbers = {id(piece): n for n, piece in enumerate(pieces)}
        read: dict[int, bytes] = {}
        for run in runs(pieces):
            read |= {numbers[id(piece)]: data for piece, data in zip(run, self._read_run(run), strict=True)}
        return [read[n] for n in range(len(pieces))]

    def _read_run(self, run: Sequence[Piece]) -> list[bytes]:
        """Read pieces of one object that lie close together by one request, unless their blocks came meanwhile."""
        if all(map(self._has, run)):
            counts: Counter[str] = Counter()
            held = [data for piece in run if (data := _read_held(self.held, self._files, piece, counts)) is not None]
            if len(held) == len(run):
                self._count(**counts)
                return held
        start = run[0].start
        end = max(piece.end for piece in run)
        data = run[0].source.get(run[0].info, start, end - start)
        self._count(store_requests=1, piece_requests=1, store_bytes=len(data))
        return [data[piece.start - start : piece.end - start] for piece in run]

    def _count(self, **added: int) -> None:
        with self._lock:
            self.counts.add(added)


def _read_held(held: HeldBlocks, files: BlockFiles | None, piece: Piece, counts: Counter[str]) -> bytes | None:
    """A piece from the blocks that are held; None unless all of them are. Its bytes are added to `counts`."""
    parts = []
    memory_bytes = 0
    for key in piece.blocks:
        first = key.number * BLOCK_BYTES
        low, high = max(piece.start, first) - first, min(piece.end, first + BLOCK_BYTES) - first
        part = held.read(key, low, high)
        if part is not None:
            memory_bytes += len(part)
        elif files is None or (part := files.read(key, low, high - low)) is None:
            return None
        parts.append(part)
    counts["memory_bytes"] += memory_bytes
    counts["disk_bytes"] += piece.length - memory_bytes
    return parts[0] if len(parts) == 1 else b"".join(parts)


BLOCKS: Final = Blocks()
"""The blocks of this process."""
