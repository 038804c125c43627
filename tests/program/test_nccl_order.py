"""What processes give to NCCL, recorded in real runs of all layouts: would they wait for each other for ever?"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from program.conftest import Fleet
from program.nccl_model import Machine, communicators, queues_in
from program.nccl_record import ALL, Event, read
from program.reference import reference_gradients
from program.runtime_cases import Case, Degrees, Pool
from program.test_contrastive import STAGED, TENSOR_PARALLEL, case_of
from program.test_gradients import BOUNDS, KINDS, WEIGHTS, assert_close
from program.test_grouped import HEADS, MIXED

from trainclient.topology.device_queues import communicators_of
from trainclient.topology.process_grid import Topology

LARGE = 1 << 22
"""Bytes of a message that NCCL keeps by default."""


class Script:
    """What one of two processes does."""

    def __init__(self, rank: int) -> None:
        self.rank, self.events = rank, list[Event]()

    def begin(self, group: str, *, sends: bool, batch: int = -1, on_device: bool = True, tag: int = 0) -> int:
        """Begin a message of one byte to or from the other process; its number."""
        number = sum(not event.waits for event in self.events)
        self.events.append(Event(number, False, group, (0, 1), on_device, sends, 1 - self.rank, batch, 1, tag))
        return number

    def wait(self, number: int) -> None:
        self.events.append(Event(number, waits=True))

    def connect(self, *groups: str) -> None:
        """A message each way in every group."""
        for group in groups:
            batch = len(self.events)
            self.begin(group, sends=True, batch=batch)
            self.wait(self.begin(group, sends=False, batch=batch))

    def all(self, group: str) -> None:
        number = sum(not event.waits for event in self.events)
        self.events.append(Event(number, False, group, (0, 1), True, True, ALL))


def scripts(*groups: str) -> tuple[Script, Script]:
    """Two processes that are connected."""
    both = Script(0), Script(1)
    for script in both:
        script.connect(*groups)
    return both


def stuck(both: Sequence[Script], **options: object) -> int:
    """How many of them never end."""
    return len(Machine([script.events for script in both], **options).stuck())  # type: ignore[arg-type]


def test_transfers_wait_for_both_ends_and_for_what_was_computed_before() -> None:
    both = scripts("there", "back")
    both[0].wait(both[0].begin("there", sends=True))
    both[0].wait(both[0].begin("back", sends=False))
    both[1].wait(both[1].begin("there", sends=False))
    both[1].wait(both[1].begin("back", sends=True))
    assert stuck(both) == stuck(both, in_step=True) == stuck(both, loads=True) == 0
    both[0].begin("there", sends=True)
    assert stuck(both) == 1, "nobody receives it"
    assert stuck(both, buffered_bytes=1) == 0


def test_each_sends_before_it_receives() -> None:
    """As in 1F1B: the host goes on, so a queue for each communicator is enough, and one for both is not."""
    both = scripts("there", "back")
    for script, out, into in ((both[0], "there", "back"), (both[1], "back", "there")):
        script.begin(out, sends=True)
        script.wait(script.begin(into, sends=False))
    assert stuck(both) == stuck(both, in_step=True) == 0
    assert stuck(both, queue_of=lambda *_: 0) == 2
    assert stuck(both, queue_of=lambda *_: 0, buffered_bytes=1) == 0


def test_a_wait_for_a_send_holds_up_what_is_computed_next() -> None:
    both = scripts("there", "back")
    for script, out, into in ((both[0], "there", "back"), (both[1], "back", "there")):
        script.wait(script.begin(out, sends=True))
        script.wait(script.begin(into, sends=False))
    assert stuck(both) == 0, "a receive begins beside what is computed"
    assert stuck(both, in_step=True) == 2, "if its host comes so far"


def test_a_device_that_loads_a_kernel_ends_no_receive_that_was_begun_ahead() -> None:
    """What was seen on an H200: each was about to compute what the other one waited for."""
    ahead = scripts("there", "back")
    for script, out, into in ((ahead[0], "there", "back"), (ahead[1], "back", "there")):
        arriving = script.begin(into, sends=False)
        script.begin(out, sends=True)
        script.wait(arriving)
    assert stuck(ahead) == 0
    assert stuck(ahead, loads=True, buffered_bytes=1) == 2
    behind = scripts("there", "back")
    for script, out, into in ((behind[0], "there", "back"), (behind[1], "back", "there")):
        header = script.begin("headers", sends=False, on_device=False)
        script.begin(out, sends=True)
        script.begin("headers", sends=True, on_device=False)
        script.wait(header)
        script.wait(script.begin(into, sends=False))
    assert stuck(behind) == stuck(behind, loads=True, buffered_bytes=1) == 0
    assert stuck(behind, loads=True) == 2, "of large messages the sends keep both devices"


@pytest.mark.parametrize("on_device", [False, True])
def test_gloo_tells_messages_apart_by_tags(*, on_device: bool) -> None:
    """NCCL takes them in their order; here the second one is no message of rows, whose kernel waits for the first."""
    both = scripts("there")
    both[0].begin("there", sends=True, on_device=on_device, tag=1)
    both[0].wait(both[0].begin("there", sends=True, on_device=on_device, tag=2))
    both[1].wait(both[1].begin("there", sends=False, on_device=on_device, tag=2))
    found = Machine([script.events for script in both])
    assert len(found.stuck()) == on_device
    both[1].wait(both[1].begin("there", sends=False, on_device=on_device, tag=1))
    assert stuck(both, in_step=True) == 0


def test_first_messages_hold_up_hosts() -> None:
    """So all are connected in one order."""
    both = Script(0), Script(1)
    both[0].begin("there", sends=True)
    both[0].begin("back", sends=False)
    both[1].begin("back", sends=True)
    both[1].begin("there", sends=False)
    assert stuck(both) == stuck(both, buffered_bytes=1) == 2
    for script, found in zip(both, scripts("there", "back"), strict=True):
        found.events += [replace(e, number=e.number + len(found.events)) for e in script.events]
        script.events = found.events
    assert stuck(both) == 0


def test_collectives_keep_one_order() -> None:
    one, other = Script(0), Script(1)
    for script, groups in ((one, "ab"), (other, "ba")):
        for group in groups:
            script.all(group)
    assert stuck((one, other)) == 2
    other.events = one.events
    assert stuck((one, other)) == 0


def check(records: Sequence[Sequence[Event]], topology: Topology) -> None:
    """Whether all come to their ends: with queues as the trainer asks for them, with hosts that do not run ahead, and
    where messages are small also with devices that wait for all they do."""
    found = [len(communicators(events)) for events in records]
    assert all(0 < used <= known for used, known in zip(found, communicators_of(topology), strict=True)), found
    assert Machine(records).stuck() == []
    assert Machine(records, in_step=True).stuck() == []
    assert Machine(records, queue_of=queues_in(records, max(found))).stuck() == []
    assert Machine(records, loads=True, buffered_bytes=LARGE).stuck() == []


RUNS = {
    "interleaved": (Degrees(1, 1, 2, 1, chunks=2), "none", {}),
    "ranks": (Degrees(2, 2, 2, 1), "zero2", {}),
    "sharded": (Degrees(1, 2, 2, 1, recompute=("llm",)), "zero3", {}),
    "several modules": (Degrees(2, 2, 1, 1, second_encoder=1, second_generator=1), "none", {}),
    "frozen": (Degrees(1, 2, 2, 1, frozen=("vit",)), "none", {"extra_in_flight": 2}),
    "sequences": (Degrees(1, 1, 2, 1, sp=2), "none", {}),
    "tensors": (Degrees(1, 1, 2, 1, tp=(1, 2, 1)), "none", {"global_batch": 4}),
    "groups": (Degrees(1, 4, 1, 1, group=4), "zero3", MIXED),
    "phases": (Degrees(2, 2, 1, 2, colocated=True), "zero3", {}),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "interleaved" else pytest.mark.long) for n in RUNS],
)
def test_no_process_waits_for_ever(fleet: Fleet, pool: Pool, tmp_path: Path, name: str) -> None:
    """And gradients are those of one process in the order of GPUs, too."""
    degrees, sharding, options = RUNS[name]
    of_backbone = HEADS if degrees.group else {}
    ours, reference = fleet.pair_of_jobs(degrees, **options)
    modules = {"llm": {**of_backbone, "sharding": sharding}}
    case = Case("run", fleet.address, ours, sharding=dict.fromkeys(KINDS, sharding), modules=modules, **WEIGHTS)
    found = pool.run([replace(case, recorded=True)], tmp_path)["run"]
    alone = replace(case, job=reference, sharding={}, modules={"llm": of_backbone} if of_backbone else {})
    expected = {k: g for k, g in reference_gradients(alone).items() if k.split(".")[0] not in degrees.frozen}
    assert_close(found, expected, BOUNDS["float64"])
    records = read(tmp_path, degrees.world_size)
    topology = Topology.of(case.parsed.spec)
    check(records, topology)
    if topology.message_edges:
        assert Machine(records, queue_of=queues_in(records, 1)).stuck(), "why queues are required"
        assert Machine(records, loads=True).stuck(), "why rows go through hosts in the first step"


@pytest.mark.long
@pytest.mark.parametrize("degrees", [STAGED, TENSOR_PARALLEL], ids=["stages", "tensors"])
def test_no_tower_waits_for_ever(fleet: Fleet, pool: Pool, tmp_path: Path, degrees: dict[str, tuple[int, ...]]) -> None:
    case = case_of(fleet, "towers", degrees, "clip", microbatches=2)
    pool.run([replace(case, recorded=True)], tmp_path)
    topology = Topology.of(case.parsed.spec)
    check(read(tmp_path, topology.world_size), topology)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("rows_by_host", "steps", "on_devices"), [("first", 1, False), ("first", 2, True), ("always", 2, False)]
)
def test_in_the_first_step_no_device_waits_for_another(
    fleet: Fleet, pool: Pool, tmp_path: Path, *, rows_by_host: str, steps: int, on_devices: bool
) -> None:
    """Whatever it does for the first time; from the second step on rows go from device to device."""
    job = fleet.job(Degrees(1, 1, 2, 1), end={"steps": 4}).spec.model_dump(mode="json")
    training = {"steps": steps, "rows_by_host": rows_by_host}
    case = Case("run", fleet.address, job, recorded=True, training=training)
    pool.run([case], tmp_path)
    records = read(tmp_path, 4)
    check(records, Topology.of(case.parsed.spec))
    assert bool(Machine(records, loads=True).stuck()) == on_devices
    assert any(e.on_device and e.peer != ALL and e.num_bytes > 1 for events in records for e in events) == on_devices
