"""A model of transfers between processes that keep nothing in between: who would wait for whom for ever?

Each process runs its list of acts. What it sends and receives goes to queues, one for each communicator. Only
the first entry is under way, and ends when all messages of it have found their other end at the first place there.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from dataserver.planning.simulation import OperationKind
from trainclient.program.posted_receives import posted_receives
from trainclient.program.step_programs import StepPrograms
from trainclient.topology.process_grid import Topology

Pair = tuple[int, int]


@dataclass(frozen=True)
class Transfer:
    """The rows of a microbatch over one edge, or their gradients."""

    edge: str
    back: bool
    microbatch: int

    def __str__(self) -> str:
        return f"{'gradients' if self.back else 'rows'} {self.microbatch} of {self.edge}"


@dataclass(frozen=True)
class Act:
    """What a process does: it begins a transfer, as one end of it, or waits until it is over."""

    transfer: Transfer
    begins: bool
    sends: bool = False


def acts(programs: StepPrograms, topology: Topology, rank: int, *, ahead: bool = True) -> list[Act]:
    """The list of a process; without `ahead` as if every view came only when it is needed."""
    process = topology.processes[rank]
    operations = programs.of_process(process).operations
    found: dict[Act, None] = {}
    for operation, due in zip(operations, posted_receives(programs, topology, process), strict=True):
        for receive in due if ahead else ():
            edge = topology.into(process.chunks[receive.chunk])[receive.edge]
            found[Act(Transfer(str(edge), False, receive.microbatch), begins=True)] = None
        chunk, k = process.chunks[operation.chunk], operation.microbatch
        into, out = topology.into(chunk), topology.out_of(chunk)
        if operation.kind is OperationKind.FORWARD:
            rows = [Transfer(str(edge), False, k) for edge in into]
            found |= dict.fromkeys(Act(t, begins=True) for t in rows)
            found |= dict.fromkeys(Act(t, begins=False) for t in rows)
            for edge in out:
                found[Act(Transfer(str(edge), False, k), begins=True, sends=True)] = None
                if edge.returns:
                    found[Act(Transfer(str(edge), True, k), begins=True)] = None
        elif operation.kind is OperationKind.BACKWARD:
            found |= dict.fromkeys(Act(Transfer(str(edge), True, k), begins=False) for edge in out if edge.returns)
            found |= dict.fromkeys(
                Act(Transfer(str(edge), True, k), begins=True, sends=True) for edge in into if edge.returns
            )
    return list(found)


@dataclass
class World:
    """All processes, and what is under way between them."""

    lists: Sequence[Sequence[Act]]
    pairs: Callable[[Transfer], Sequence[Pair]]
    """Who sends to whom in a transfer."""
    communicator: Callable[[Transfer], Hashable]
    """What a transfer goes through. The transfers of one keep the order in which a process begins them."""
    sends_block: bool
    """Whether a process waits until what it sends has arrived."""
    queues: dict[tuple[Hashable, int], deque[tuple[Transfer, bool]]] = field(default_factory=dict)
    moved: set[tuple[Transfer, Pair]] = field(default_factory=set)

    def run(self) -> list[str]:
        """What each process waits for that never ends; nothing if all come to their ends."""
        left = [deque(found) for found in self.lists]
        while any([*(self._go_on(rank, todo) for rank, todo in enumerate(left)), *self._move()]):
            pass
        return [f"rank {rank}: {todo[0].transfer}" for rank, todo in enumerate(left) if todo]

    def _go_on(self, rank: int, todo: deque[Act]) -> bool:
        """Let a process run until it waits; whether it did anything."""
        count = len(todo)
        while todo:
            act, over = todo[0], self._is_over(todo[0].transfer, rank, todo[0].sends)
            if act.begins and not over:
                queue = self.queues.setdefault((self.communicator(act.transfer), rank), deque())
                if (act.transfer, act.sends) not in queue:
                    queue.append((act.transfer, act.sends))
            if not over and (not act.begins or (act.sends and self.sends_block)):
                break
            todo.popleft()
        return len(todo) < count

    def _move(self) -> Iterator[bool]:
        """Let messages move whose both ends are first in their queues; whether any did."""
        for (_, rank), queue in self.queues.items():
            while queue:
                transfer, sends = queue[0]
                here = [p for p in self._own(transfer, rank, sends) if self._is_first(transfer, p)]
                yield not self.moved.issuperset((transfer, pair) for pair in here)
                self.moved.update((transfer, pair) for pair in here)
                if not self._is_over(transfer, rank, sends):
                    break
                queue.popleft()
                yield True

    def _own(self, transfer: Transfer, rank: int, sends: bool) -> list[Pair]:
        return [p for p in self.pairs(transfer) if p[0 if sends else 1] == rank and p[0] != p[1]]

    def _is_over(self, transfer: Transfer, rank: int, sends: bool) -> bool:
        return all((transfer, pair) in self.moved for pair in self._own(transfer, rank, sends))

    def _is_first(self, transfer: Transfer, pair: Pair) -> bool:
        queues = (self.queues.get((self.communicator(transfer), rank)) for rank in pair)
        ends = zip(queues, (True, False), strict=True)
        return all(queue and queue[0] == (transfer, sends) for queue, sends in ends)


def stuck(
    lists: Sequence[Sequence[Act]],
    pairs: Callable[[Transfer], Sequence[Pair]],
    communicator: Callable[[Transfer], Hashable],
    *,
    sends_block: bool,
) -> list[str]:
    """What each process waits for that never ends, as `World` says."""
    return World(lists, pairs, communicator, sends_block).run()
