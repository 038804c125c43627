"""What a reader holds: microbatches ahead, buffers, a stream and a thread, and when it lets go of them."""

import gc
import threading
from collections.abc import Callable

import pytest
from client.fake_server import NUM_STEPS, job_data
from client.opened import ALL, VIEW, Opened, Serve, receiving_threads

from trainclient.stream.endpoint import Timeouts
from trainclient.stream.errors import ClosedError
from trainclient.stream.fleet import Fleet
from trainclient.stream.jobs import resolve_job
from trainclient.stream.reader import MicrobatchReader


def test_prefetch_is_bounded_in_bytes(serve: Serve) -> None:
    server = serve()
    for limit, room in ((1, 1), (1 << 30, len(ALL) - 1)):
        with Opened([server.address], Timeouts(), prefetch_bytes=limit) as opened:
            sizes = [next(opened.reader).nbytes]
            most = settled(lambda: opened.reader._handoff.ready_bytes)
            sizes += [m.nbytes for m in opened.reader]
        assert most == sum(sizes[1 : 1 + room])


def settled(read: Callable[[], int]) -> int:
    """A number that is above zero and does not change any more."""
    pause = threading.Event()
    before, equal = read(), 0
    while equal < 10:
        pause.wait(0.05)
        now = read()
        equal = equal + 1 if now == before and now > 0 else 0
        before = now
    return before


def test_buffers_are_recycled_and_held_microbatches_stay(serve: Serve, patient: Timeouts) -> None:
    with Opened([serve().address], patient, prefetch_bytes=1) as opened:
        held = list(opened.reader)
        for microbatch in held:
            opened.check(microbatch)
    addresses = set()
    with Opened([serve().address], patient, prefetch_bytes=1) as opened:
        for microbatch in opened.reader:
            opened.check(microbatch)
            addresses.add(next(iter(microbatch.tensors.values())).ctypes.data)
    assert len(addresses) < len(ALL)
    for microbatch in held:
        opened.check(microbatch)


def test_closing_ends_the_stream_at_the_server(serve: Serve, patient: Timeouts) -> None:
    server = serve(streams=["hang:1"])
    with Opened([server.address], patient) as opened:
        next(opened.reader)
        opened.reader.close()
        assert server.ended.acquire(timeout=60)
        with pytest.raises(ClosedError, match="open another one"):
            next(opened.reader)
        opened.reader.close()
    with Opened([serve().address], patient) as opened:
        with opened.reader:
            next(opened.reader)
        with pytest.raises(ClosedError, match="open another one"):
            next(opened.reader)


def test_closing_wakes_a_waiting_caller(serve: Serve) -> None:
    with Opened([serve(streams=["hang:0"]).address], Timeouts()) as opened:
        outcome: list[Exception] = []

        def wait() -> None:
            try:
                next(opened.reader)
            except ClosedError as error:
                outcome.append(error)

        caller = threading.Thread(target=wait)
        caller.start()
        opened.reader.close()
        caller.join(60)
        assert len(outcome) == 1


def test_closing_ends_a_pause_between_tries(serve: Serve) -> None:
    server = serve(streams=["cut:0"] * 100)
    with Opened([server.address], Timeouts()) as opened:
        threading.Event().wait(1.0)  # by now pauses are longer than a moment
        opened.reader.close()
        assert not receiving_threads()


def test_a_forgotten_reader_ends_its_thread(serve: Serve, patient: Timeouts) -> None:
    server = serve(streams=["hang:1"])
    fleet = Fleet(server.address, timeouts=patient)
    reader = MicrobatchReader(fleet, resolve_job(job_data(), fleet), VIEW, num_steps=NUM_STEPS)
    next(reader)
    del reader
    gc.collect()
    assert not receiving_threads()
    fleet.close()


def test_a_reader_in_a_fork_raises_and_the_parent_goes_on(serve: Serve, patient: Timeouts, run_python) -> None:
    server = serve(delay_s=0.05)
    program = f"""
import os, sys
from client.opened import *
from trainclient.stream.errors import ForkError
with Opened(["{server.address}"], Timeouts()) as opened:
    next(opened.reader)
    child = os.fork()
    if child == 0:
        try:
            next(opened.reader)
        except ForkError as error:
            opened.reader.close()
            os._exit(7)
        os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert opened.read_all() == ALL[1:]
print("child", code, flush=True)
os._exit(0)  # as the child: after a fork in the middle of a call gRPC's own end hung once in some hundred runs
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["child", "7"], done.stderr


def test_the_interpreter_exits_with_an_open_reader(serve: Serve, run_python) -> None:
    server = serve(streams=["hang:1"])
    program = f"""
from client.opened import *
fleet = Fleet("{server.address}")
reader = MicrobatchReader(fleet, resolve_job(job_data(), fleet), VIEW, num_steps=NUM_STEPS)
print(next(reader).step)
"""
    done = run_python(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_the_interpreter_exits_with_a_generator_that_has_a_call_in_flight(serve: Serve, run_python) -> None:
    """What it holds is closed when gRPC's threads have ended already, which the end of a call needs."""
    server = serve(streams=["hang:1"])
    program = f"""
from client.opened import *
from disttrain.v1.data_service_pb2 import StreamMicrobatchesRequest
from trainclient.stream.endpoint import CallGuard

def steps():
    fleet = Fleet("{server.address}")
    job = resolve_job(job_data(), fleet)
    request = StreamMicrobatchesRequest(job_id=job.job_id, module=VIEW.module, rank=VIEW.rank)
    try:
        call = fleet.endpoints[0].stream(request, CallGuard())
        yield len(next(call)) > 0
        yield call
    finally:
        fleet.close()

held = steps()
print(next(held))
"""
    done = run_python(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_the_stream_client_imports_neither_torch_nor_pillow(run_python) -> None:
    program = """
import sys
import trainclient.stream.reader, trainclient.stream.jobs
heavy = {"torch", "PIL", "pyarrow", "pandas"} & set(sys.modules)
ours = {m for m in sys.modules if m.startswith("dataserver.")}
may = tuple(f"dataserver.{name}" for name in ("planning", "addresses", "extras", "job_files", "security", "tracing"))
print(sorted(heavy), all(m.startswith(may) for m in ours))
"""
    done = run_python(program)
    assert done.stdout == "[] True\n", done.stderr


def test_without_torch_the_client_says_what_to_install(run_python) -> None:
    done = run_python("import sys; sys.modules['torch'] = None; import trainclient.client")
    assert "pip install '.[train]'" in done.stderr.splitlines()[-1]
    assert "ArrayClient" in done.stderr.splitlines()[-1]
