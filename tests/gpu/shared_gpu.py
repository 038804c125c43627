"""`trainclient train` over NCCL, one process for each rank, on as few GPUs as there are.

NCCL refuses two processes of one machine on one GPU. It takes them for processes of as many machines where each is told
another NCCL_HOSTID: transfers then go through sockets of the loopback interface, in the kernels, streams and order in
which they would run between machines. What that takes says nothing of a cluster.
"""

import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from training.runs import TIMEOUT_S, variables

OPTIONS = ("--device", "cuda", "--timeout-s", "60")
"""A process that waits too long for another says what each of them was doing."""


def train_over_nccl(command: Sequence[str], world_size: int, logs: Path) -> None:
    """Run to the end; each process writes a log into that folder.

    Raises:
        AssertionError: a process failed or hangs; with the ends of all logs.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as stack:
        files = [logs / f"rank-{rank}.log" for rank in range(world_size)]
        ranks = []
        for rank, file in enumerate(files):
            log, place = stack.enter_context(file.open("w")), _place(rank, world_size, port)
            ranks.append(subprocess.Popen([*command, *OPTIONS], stderr=log, env=variables() | place))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        patience = time.monotonic() + TIMEOUT_S
        for process in ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, patience - time.monotonic()))
        codes = [process.poll() for process in ranks]  # None of one that hangs
    wrong = any(code != 0 for code in codes)
    told = [f"{file.name}: {code}\n{file.read_text()[-3000:]}" for file, code in zip(files, codes, strict=True)]
    assert not wrong, "\n".join(told)


def _place(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would say on a machine of its own with one process, and what NCCL needs to believe it."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": str(rank % torch.cuda.device_count()),
        "NCCL_HOSTID": f"rank-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }
