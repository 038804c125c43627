"""All processes of a run on this machine, as `torchrun --standalone` would start them."""

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from math import ceil

import psutil
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainclient.topology.process_grid import Topology
from trainclient.torch_compat import shutdown_timeout
from trainclient.training.config import TrainConfig
from trainclient.training.jobs import Jobs
from trainclient.training.rank import check
from trainclient.training.signals import LAUNCHER_PID

LOOPBACK = "127.0.0.1"
MONITOR_INTERVAL_S = 0.2
"""How often the processes are checked; one that ends with an error ends all."""
KILL_AFTER_S = 10
"""Seconds beyond `stop_grace_s` after which processes are killed: by then they have ended themselves."""

_KILLERS = "by the others if it was stopped, by the system if memory ran out, or by hand"
_log = logging.getLogger(__name__)


def launch(config: TrainConfig, jobs: Jobs, topology: Topology, arguments: Sequence[str]) -> int:
    """Run `trainclient` with these arguments in as many processes as the job needs, and pass signals on.

    Servers and models are checked here first, so that what is wrong with them is reported once.

    Returns:
        0 if training ended in order; 128 + the signal's number after one; 2 if a rank was refused something that the
        user can fix; otherwise 1.
    """
    check(config, jobs)
    # Worker processes talk over loopback only: host names of a laptop or container often do not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[LAUNCHER_PID] = str(os.getpid())  # ranks watch it: it may be gone before they could ask for their parent
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=topology.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
        logs_specs=DefaultLogsSpecs(
            os.devnull
        ),  # else it makes a folder of logs in the temp folder, and leaves it there
        **shutdown_timeout(ceil(config.stop_grace_s) + KILL_AFTER_S),
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "trainclient", *arguments)
    except ChildFailedError as error:
        _log.debug("the processes failed", exc_info=error)
        return _explain({rank: failure.exitcode for rank, failure in error.failures.items()})
    except SignalException as stopped:
        sys.stderr.write(f"trainclient: stopped by {stopped.sigval.name}\n")
        return 128 + stopped.sigval
    finally:
        _end_forgotten()
    return 0


def _end_forgotten() -> None:
    """End the processes that torch started and does not know of: a signal while it starts them makes it lose them.

    They have sessions of their own, so nothing else would end them; and they are at their start, so nothing is lost.
    """
    forgotten = psutil.Process().children(recursive=True)
    for process in forgotten:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(forgotten)


def _explain(codes: Mapping[int, int]) -> int:
    """Name the ranks that could not report why they ended; returns the exit code.

    What is left of a run that lost a rank fails within moments, so which one was first is not known. Those that the
    launcher itself ended have SIGTERM.
    """
    for rank, code in sorted(codes.items()):
        if code < 0 and code != -signal.SIGTERM:
            hint = f": {_KILLERS}" if code == -signal.SIGKILL else ""
            sys.stderr.write(f"trainclient: rank {rank} was killed by {signal.Signals(-code).name}{hint}\n")
    return max([1, *codes.values()])
