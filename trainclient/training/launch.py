"""All processes of a run on this machine, as `torchrun --standalone` would start them."""

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainclient.training.config import TrainConfig
from trainclient.training.rank import prepare

LOOPBACK = "127.0.0.1"
MONITOR_INTERVAL_S = 0.2
"""How often the processes are looked after; one that ends with an error ends all."""

_log = logging.getLogger(__name__)


def launch(config: TrainConfig, arguments: Sequence[str]) -> int:
    """Run `trainclient` with these arguments in as many processes as the job needs, and pass signals on.

    Job, servers and models are checked here first, so that what is wrong with them is said once.

    Returns:
        0 if training ended in order, also after a signal; otherwise an exit code of the process that failed first.
    """
    _, layout = prepare(config)
    # Worker processes talk over loopback only: host names of a laptop or container often do not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=layout.world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:0",
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "trainclient", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        _log.debug("the processes failed", exc_info=error)
        sys.stderr.write(f"trainclient: training failed; process {rank} ended first, with code {failure.exitcode}\n")
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as signal:
        sys.stderr.write(f"trainclient: stopped by {signal.sigval.name}\n")
        return 128 + signal.sigval
    return 0
