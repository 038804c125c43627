"""Servers that are stopped, mute or cut off hold a client for seconds; those that are only busy are not left."""

import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from client.fake_server import NUM_STEPS, FakeServer, fake_process, job_data
from client.opened import ALL, VIEW
from faults.network import machine, missing
from faults.relay import Mode, Relay, relayed

from trainclient.stream.endpoint import Timeouts
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import resolve_job
from trainclient.stream.microbatch import Cursor
from trainclient.stream.reader import MicrobatchReader

pytestmark = pytest.mark.slow
BOUND_S = 8.0
"""How long one lost server may hold a client with default timeouts."""
BEFORE = 3
"""Microbatches that arrive before something happens."""
SLOW_S = 1.0
"""What a server waits before each of them: however late the client is, the server has not sent all of them by then."""


def read(first: str, happens: Callable[[], object]) -> tuple[list[Cursor], float]:
    """Read a job from two servers; the first fails in mid-stream; the cursors, and the longest wait."""
    with FakeServer() as good, ExitStack() as stack:
        fleet = Fleet([first, good.address])
        stack.callback(fleet.close)
        fleet.current = 0
        job = resolve_job(job_data(), fleet)
        reader = stack.enter_context(MicrobatchReader(fleet, job, VIEW, num_steps=NUM_STEPS, prefetch_bytes=0))
        found, longest = [], 0.0
        for microbatch in reader:
            found.append(microbatch.cursor)
            longest = max(longest, microbatch.wait_s)
            if len(found) == BEFORE:
                happens()
        assert good.requests, "the first server was not left"
    return found, longest


def a_stopped_process() -> tuple[list[Cursor], float]:
    with fake_process(delay_s=SLOW_S) as (process, address):
        return read(address, lambda: process.send_signal(signal.SIGSTOP))


def network(change: Callable[[Relay], None]) -> Callable[[], tuple[list[Cursor], float]]:
    def case() -> tuple[list[Cursor], float]:
        with fake_process(delay_s=SLOW_S) as (_, address), relayed(address) as relay:
            return read(relay.address, lambda: change(relay))

    return case


IN_MID_STREAM = {
    "a stopped process": a_stopped_process,
    "a frozen network": network(lambda relay: relay.set(Mode.FREEZE)),
    "a network that loses everything": network(lambda relay: relay.set(Mode.DROP)),
    "half a chunk": network(lambda relay: relay.set(Mode.FREEZE, after_bytes=3000)),
    "a reset connection": network(lambda relay: relay.set(Mode.RESET)),
}


def test_a_server_lost_in_mid_stream_holds_a_client_for_seconds() -> None:
    with ThreadPoolExecutor(len(IN_MID_STREAM)) as pool:  # at the same time: each of them is a wait
        results = {name: pool.submit(case) for name, case in IN_MID_STREAM.items()}
    for name, result in results.items():
        found, longest = result.result()
        assert found == [Cursor(*place) for place in ALL], name
        assert longest < 2 * BOUND_S, name


def test_a_cut_cable_holds_a_client_for_seconds() -> None:
    """Nothing comes back from the other machine, neither data nor the end of the connection."""
    if reason := missing():
        pytest.skip(reason)
    with machine() as there, fake_process(host=there.address, prefix=there.prefix, delay_s=SLOW_S) as (_, address):
        found, longest = read(address, there.cut)
    assert found == [Cursor(*place) for place in ALL]
    assert longest < 2 * BOUND_S


def test_a_server_that_never_answers_holds_a_client_for_seconds() -> None:
    """Its kernel takes the connection, or its network takes the packets, and nothing comes back."""
    with ExitStack() as stack:
        good = stack.enter_context(FakeServer())
        process, stopped = stack.enter_context(fake_process())
        process.send_signal(signal.SIGSTOP)
        mute = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        frozen = stack.enter_context(relayed(good.address))
        frozen.set(Mode.FREEZE)
        addresses = [stopped, f"127.0.0.1:{mute.getsockname()[1]}", frozen.address]

        def register(address: str) -> float:
            fleet = Fleet([address, good.address])
            fleet.current, began = 0, time.monotonic()
            assert fleet.register(resolve_job(job_data(), fleet)) == NUM_STEPS
            assert fleet.endpoints[fleet.current].address == good.address
            fleet.close()
            return time.monotonic() - began

        with ThreadPoolExecutor(len(addresses)) as pool:
            # Twice: the job is filled in by the first address that answers, and registered at the one that went on.
            assert max(pool.map(register, addresses)) < 2 * BOUND_S


def test_a_server_that_stops_in_a_long_call_is_noticed_as_soon() -> None:
    with fake_process(job_delay_s=60) as (process, address), FakeServer() as good:
        fleet = Fleet([address, good.address])
        job = resolve_job(job_data(), Fleet(good.address))
        fleet.current, began = 0, time.monotonic()
        stop = threading.Timer(1.0, lambda: process.send_signal(signal.SIGSTOP))
        stop.start()
        assert fleet.register(job) == NUM_STEPS
        assert time.monotonic() - began < 2 * BOUND_S
        stop.join()
        fleet.close()


def test_a_busy_server_and_a_consumer_that_does_not_read_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Longer than a lost server holds a client, pings are answered by gRPC alone: in the server while Python computes,
    here while the trainer takes nothing and the transport is full."""
    busy = fake_process(streams=["busy:2"], busy_s=BOUND_S + 2)
    full = fake_process(more_rows=20_000)  # a hundred megabytes
    with busy as (_, computes), full as (_, sends), ExitStack() as stack:

        def read_all(address: str, pause_s: float) -> list[Cursor]:
            fleet = Fleet([address, "127.0.0.1:1"], timeouts=Timeouts())
            fleet.current = 0
            stack.callback(fleet.close)
            job = resolve_job(job_data(), fleet)
            reader = stack.enter_context(MicrobatchReader(fleet, job, VIEW, num_steps=NUM_STEPS, prefetch_bytes=0))
            found = [next(reader).cursor]
            threading.Event().wait(pause_s)
            return [*found, *(microbatch.cursor for microbatch in reader)]

        with ThreadPoolExecutor(2) as pool:
            results = [pool.submit(read_all, computes, 0.0), pool.submit(read_all, sends, BOUND_S + 2)]
        for result in results:
            assert result.result() == [Cursor(*place) for place in ALL]
    assert not caplog.messages, "a server was left"
