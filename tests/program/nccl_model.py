"""A model of NCCL: would processes that do what was recorded wait for each other for ever?

What NCCL promises, and what not (torch's ProcessGroupNCCL, NCCL's user guide on groups and on several communicators):

- A transfer is a kernel in the stream of its communicator. It runs when all that was put there before is over, and what
  its process computed before it is, except for a batch of receives: the trainer begins these beside what is computed.
- It ends when both ends run: a kernel may keep its stream until the other end begins. Small messages may end earlier,
  which only helps. Messages between two ranks meet in their order; those of one batch move at the same time.
- Waiting for it holds up what the device computes next. The host goes on.
- The first message between two ranks in a direction, and the first collective of a group, hold up the hosts of all who
  take part until each of them has begun it.
- What goes over gloo (headers, views) holds up the host that waits for it. A message that nobody has posted memory for
  is kept by nobody.

Three things come on top where they are asked for: several communicators share one queue of the device; the host does
not run ahead of what is computed, since the queue of launches is full; and a call waits for all kernels of the device,
transfers among them, as the first use of a kernel may.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from program.nccl_record import ALL, Event

Key = tuple[Hashable, ...]
"""One end of a message, or one rank's part of a collective: group, sender, receiver, count; all of it is the same at
the other end."""


def own_queues(rank: int, group: str) -> Hashable:
    """A queue of the device for each communicator."""
    del rank
    return group


@dataclass(eq=False)
class Transfer:
    """A kernel of one process, or what a host does over gloo."""

    rank: int
    ends: list[tuple[Key, tuple[int, ...]]]
    """Of each message: its name, and the ranks that must take part."""
    queue: Hashable
    after: int
    """How many waits of what is computed must be over before."""
    on_device: bool
    runs: bool = False
    over: bool = False


@dataclass
class Process:
    """Where one process is."""

    events: deque[Event]
    transfers: dict[int, Transfer] = field(default_factory=dict)
    """Those that it has begun, by number."""
    queues: defaultdict[Hashable, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))
    waits: list[Transfer] = field(default_factory=list)
    """What the device waits for between what it computes, in order."""
    passed: int = 0
    """How many of these are over."""


@dataclass
class Machine:
    """All processes."""

    records: Sequence[Sequence[Event]]
    queue_of: Callable[[int, str], Hashable] = own_queues
    """The queue of a rank's device in which the transfers of a group stand."""
    in_step: bool = False
    """Whether a host goes on only when its device has computed all that it was given."""
    loads: bool = False
    """Whether every call waits until all transfers of its device are over."""
    buffered_bytes: int = 0
    """Messages of so many bytes leave without their receiver."""

    def __post_init__(self) -> None:
        self._processes = [Process(deque(events)) for events in self.records]
        self._counts: Counter[tuple[Hashable, ...]] = Counter()
        self._running: defaultdict[Key, set[int]] = defaultdict(set)
        self._begun: defaultdict[Key, set[int]] = defaultdict(set)
        self._met: set[Hashable] = set()
        self._sizes: dict[Key, int] = {}

    def stuck(self) -> list[str]:
        """What each process that never comes to its end waits for; nothing if all do."""
        while any([*map(self._host, range(len(self._processes))), *map(self._device, range(len(self._processes)))]):
            pass
        return [text for rank, process in enumerate(self._processes) if (text := self._left(rank, process))]

    def _left(self, rank: int, process: Process) -> str:
        running = [t for queue in process.queues.values() for t in queue]
        if not process.events and not running:
            return ""
        what = f"its host before {process.events[0]}" if process.events else "its device"
        return f"rank {rank}: {what}, with {[end[0] for t in running for end in t.ends]}"

    def _host(self, rank: int) -> bool:
        process, moved = self._processes[rank], False
        while process.events and self._goes_on(rank, process):
            moved = True
        return moved

    def _goes_on(self, rank: int, process: Process) -> bool:
        """Do what comes next, if the host can."""
        if self.in_step and process.passed < len(process.waits):
            return False
        if self.loads and any(process.queues.values()):
            return False
        event = process.events[0]
        if not event.waits:
            together = [event]
            while event.batch >= 0 and len(together) < len(process.events):
                following = process.events[len(together)]
                if following.waits or following.batch != event.batch:
                    break
                together.append(following)
            return self._begin(rank, process, together)
        transfer = process.transfers[event.number]
        if not transfer.on_device and not self._is_complete(transfer):
            return False
        if transfer.on_device:
            process.waits.append(transfer)
        process.events.popleft()
        return True

    def _begin(self, rank: int, process: Process, together: list[Event]) -> bool:
        first = together[0]
        if first.number not in process.transfers:
            ends = [self._end(rank, event) for event in together]
            receives = all(event.peer != ALL and not event.sends for event in together)
            after = 0 if receives else len(process.waits)
            queue = self.queue_of(rank, first.group) if first.on_device else None
            transfer = Transfer(rank, ends, queue, after, first.on_device)
            process.transfers |= dict.fromkeys((event.number for event in together), transfer)
            for key, _ in ends:
                self._begun[key].add(rank)
            if transfer.on_device:
                process.queues[transfer.queue].append(transfer)
        transfer = process.transfers[first.number]
        if transfer.on_device and not all(self._have_met(key, ranks) for key, ranks in transfer.ends):
            return False
        for _ in together:
            process.events.popleft()
        return True

    def _end(self, rank: int, event: Event) -> tuple[Key, tuple[int, ...]]:
        if event.peer == ALL:
            name: tuple[Hashable, ...] = (event.group, "all")
            ranks = event.ranks
            self._counts[(*name, rank)] += 1
            return (*name, self._counts[(*name, rank)]), ranks
        pair = (rank, event.peer) if event.sends else (event.peer, rank)
        name = (event.group, *pair) if event.on_device else ((event.group, event.tag), *pair)
        self._counts[(*name, event.sends)] += 1
        key = (*name, self._counts[(*name, event.sends)])
        self._sizes[key] = event.num_bytes
        return key, pair

    def _have_met(self, key: Key, ranks: tuple[int, ...]) -> bool:
        """Whether all who take part have begun their first one together."""
        if key[:-1] not in self._met and self._begun[key] >= set(ranks):
            self._met.add(key[:-1])
        return key[:-1] in self._met

    def _is_complete(self, transfer: Transfer) -> bool:
        """Over gloo: whether all who take part have begun it."""
        return all(self._begun[key] >= set(ranks) for key, ranks in transfer.ends)

    def _device(self, rank: int) -> bool:
        process, moved = self._processes[rank], False
        while process.passed < len(process.waits) and process.waits[process.passed].over:
            process.passed, moved = process.passed + 1, True
        for queue in process.queues.values():
            while queue:
                transfer = queue[0]
                if not transfer.runs and process.passed >= transfer.after:
                    transfer.runs, moved = True, True
                    for key, _ in transfer.ends:
                        self._running[key].add(rank)
                if not transfer.runs or not all(self._has_moved(*end, rank) for end in transfer.ends):
                    break
                transfer.over = moved = True
                queue.popleft()
        return moved

    def _has_moved(self, key: Key, ranks: tuple[int, ...], rank: int) -> bool:
        leaves = len(ranks) == 2 and key[1:-1] == ranks and rank == ranks[0]
        if leaves and key in self._sizes and self._sizes[key] <= self.buffered_bytes:
            return True
        return self._running[key] >= set(ranks)


def queues_in(records: Sequence[Sequence[Event]], number: int) -> Callable[[int, str], Hashable]:
    """Where each device has so many queues: communicators take them in turn, in the order of their first use."""
    orders = [communicators(events) for events in records]
    return lambda rank, group: orders[rank].index(group) % number


def communicators(events: Sequence[Event]) -> list[str]:
    """The groups of a process that are NCCL's, in the order of their first use."""
    return list(dict.fromkeys(event.group for event in events if event.on_device))
