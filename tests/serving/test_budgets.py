"""Memory of a server: what it takes by default, what it says at start, and that it lives within a container's limit."""

import json
import logging
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from cli.server_process import TIMEOUT_S, command
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from serving.harness import index
from shards import write_pairs

from dataserver.dataset import Memory
from dataserver.serving import budgets as budgets_module
from dataserver.serving import config as config_module
from dataserver.serving.budgets import PROCESS_BYTES, Budgets, budgets, microbatch_bytes, remark
from dataserver.serving.config import load_config
from dataserver.serving.stream_memory import ByteBudget

MIB = 1 << 20
GIB = 1 << 30


def test_what_a_server_takes_by_default_fits_the_memory_that_it_may_use() -> None:
    for memory in (300 * MIB, 900 * MIB, 4 * GIB, 1024 * GIB):
        taken = budgets(memory)
        left = microbatch_bytes(memory, taken)
        assert sum(taken) + left + PROCESS_BYTES <= memory
        assert left >= memory // 5
        assert taken.prefetch_bytes >= memory // 10 or taken.prefetch_bytes == GIB
    assert budgets(6 * GIB) == Budgets(GIB, GIB)
    assert budgets(1) == Budgets(0, 64 * MIB)


def test_defaults_follow_the_memory_and_what_is_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (config_module, budgets_module):
        monkeypatch.setattr(module, "usable_memory", lambda: Memory(600 * MIB, ""))
    monkeypatch.setattr(budgets_module, "usable_cores", lambda: 64)
    asked = {"datasets": {"d": Path("/d")}}
    found = load_config(None, asked)
    assert Budgets(found.prefetch_bytes, found.job_bytes) == budgets(600 * MIB)
    assert found.decode_threads == (600 - 128) // 64
    chosen = load_config(None, {**asked, "prefetch_bytes": 7 * GIB, "job_bytes": 3 * GIB, "decode_threads": 9})
    assert (chosen.prefetch_bytes, chosen.job_bytes, chosen.decode_threads) == (7 * GIB, 3 * GIB, 9)


def test_what_is_said_at_start() -> None:
    small, large = Memory(300 * MIB, "the limit of its control group"), Memory(16 * GIB, "this machine's memory")
    assert remark(budgets(large.num_bytes), large) is None
    level, line = remark(budgets(small.num_bytes), small) or (0, "")
    assert level == logging.INFO
    assert line.startswith("of 300 MiB, the limit of its control group, this server takes 128 for itself, 36 to work")
    level, line = remark(Budgets(GIB, GIB), small) or (0, "")
    assert level == logging.WARNING
    assert "may use 300 MiB, the limit of its control group, and may need 2,236: " in line
    assert "1,024 to work ahead (--prefetch-bytes)" in line
    assert "give it more memory, or lower these flags" in line
    assert (remark(budgets(100 * MIB), Memory(100 * MIB, "")) or (0, ""))[0] == logging.WARNING


def test_streams_share_the_room_for_their_own_microbatches() -> None:
    budget = ByteBudget(0, for_microbatches=10)
    first, second = budget.open(), budget.open()
    assert first.reserve(6)
    assert first.reserve(6), "it has so much"
    assert first.reserve(4)
    assert not second.reserve(5)
    assert second.reserve(4)
    assert not first.reserve(7)
    first.close()
    assert first.reserve(100), "nothing is asked for after the end"
    assert second.reserve(10)
    assert not budget.open().reserve(1)


def control_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with that limit, where one can be made."""
    for top, name in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        folder = Path("/sys/fs/cgroup", top, "disttrain-test")
        try:
            folder.mkdir(exist_ok=True)
        except OSError:
            continue
        try:
            try:
                (folder / name).write_text(str(limit_bytes))
            except OSError:
                continue
            yield folder
            return
        finally:
            folder.rmdir()
    pytest.skip("no control group with a limit of memory can be made here; root can, where they are mounted writable")


@pytest.fixture
def group() -> Iterator[Path]:
    yield from control_group(256 * MIB)


@pytest.mark.slow
def test_eight_streams_that_are_not_read_do_not_have_a_server_killed(group: Path, tmp_path: Path) -> None:
    """All of them work ahead as far as they may: without regard to the limit they took more than it in all."""
    folder = index(write_pairs(tmp_path / "d", 64, 32, median_size=440))
    modules = [{"name": "vit", "kind": "encoder", "dp": 8}, {"name": "llm", "kind": "backbone", "dp": 8}]
    stream = {"datasets": [{"name": "d"}], "seq_len": 2048, "global_batch": 256, "packing": {"enabled": False}}
    execution = {"modules": modules, "microbatch": 8, "end": {"steps": 1000}}
    spec = json.dumps({"stream": stream, "execution": execution})
    line = command("serve", "--listen", "127.0.0.1:0", "--dataset", f"d={folder}", "--decode-threads", "8")
    entering = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *line]
    with (
        subprocess.Popen(entering, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
        ExitStack() as stack,
    ):
        assert server.stdout is not None
        assert server.stderr is not None
        stack.callback(server.kill)
        address = server.stdout.readline().removeprefix("listening on ").strip()
        stub = DataServiceStub(stack.enter_context(grpc.insecure_channel(address)))
        job_id = stub.GetOrCreateJob(pb.GetOrCreateJobRequest(job_spec_json=spec), timeout=TIMEOUT_S).job_id
        streams = []
        for rank in range(8):
            own = stack.enter_context(grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]))
            request = pb.StreamMicrobatchesRequest(job_id=job_id, module="vit", rank=rank)
            streams.append(DataServiceStub(own).StreamMicrobatches(request, timeout=TIMEOUT_S))
        for _ in range(20):
            for stream in streams:
                next(stream)
        assert server.poll() is None
        server.terminate()
        said = server.communicate(timeout=TIMEOUT_S)[1]
    assert "of 256 MiB, the limit of its control group" in said or "may use 256 MiB" in said
