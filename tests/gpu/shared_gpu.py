"""`trainclient train` over NCCL, one process for each rank, on as few GPUs as there are.

NCCL refuses two processes of one machine on one GPU. It takes them for processes of as many machines where each is told
another NCCL_HOSTID: transfers then go through sockets of the loopback interface, in the kernels, streams and order in
which they would run between machines. What that takes says nothing of a cluster.
"""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from ports import free_ports
from training.runs import variables

PATIENCE_S = float(os.environ.get("DISTTRAIN_CASE_S", "240"))
"""Processes that share a GPU take turns, so a run takes minutes there; `scripts/gpu_check` has less time."""
OPTIONS = ("--device", "cuda", "--timeout-s", "60")
"""A process that waits too long for another says what each of them was doing."""
ROWS_BY_HOST = "DISTTRAIN_ROWS_BY_HOST"
"""Environment variable with the `--rows-by-host` of all runs that name none."""
STACKS_S = 5.0
"""For a process to write all its stacks."""
SHOWN = 5000
"""Characters of the end of each log."""


def train_over_nccl(command: Sequence[str], world_size: int, logs: Path) -> None:
    """Run to the end; each process writes a log into that folder.

    Raises:
        AssertionError: a process failed or hangs; with the ends of all logs.
    """
    (port,) = free_ports(1)
    options = list(OPTIONS)
    if ROWS_BY_HOST in os.environ and "--rows-by-host" not in command:
        options += ["--rows-by-host", os.environ[ROWS_BY_HOST]]
    run_all(
        [*command, *options], [_environment(rank, world_size, port) for rank in range(world_size)], logs, PATIENCE_S
    )


def run_all(command: Sequence[str], places: Sequence[Mapping[str, str]], logs: Path, patience_s: float) -> None:
    """Run a command in a process for each place, which are variables of their own.

    Raises:
        AssertionError: a process failed, or has not ended in time; with the ends of all logs, which of those that hang
            begin with the stacks of all their threads.
    """
    with ExitStack() as stack:
        files = [logs / f"rank-{rank}.log" for rank in range(len(places))]
        ranks = []
        for file, place in zip(files, places, strict=True):
            log = stack.enter_context(file.open("w"))
            environment = variables() | {"PYTHONFAULTHANDLER": "1"} | dict(place)
            ranks.append(subprocess.Popen(command, stderr=log, env=environment))
            stack.callback(ranks[-1].wait)
            stack.callback(ranks[-1].kill)
        patience = time.monotonic() + patience_s
        for process in ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, patience - time.monotonic()))
        codes = [process.poll() for process in ranks]
        _have_stacks_written([process for process in ranks if process.poll() is None])
    wrong = any(code != 0 for code in codes)
    told = [f"{file.name}: {_how(code)}\n{file.read_text()[-SHOWN:]}" for file, code in zip(files, codes, strict=True)]
    assert not wrong, "\n".join(told)


def _have_stacks_written(hanging: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End processes by the signal at which Python's fault handler writes all stacks into their logs."""
    for process in hanging:
        process.send_signal(signal.SIGABRT)
    for process in hanging:
        with suppress(subprocess.TimeoutExpired):
            process.wait(STACKS_S)


def _how(code: int | None) -> str:
    return "hangs" if code is None else f"exit code {code}"


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
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
