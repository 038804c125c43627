"""One of torchrun's processes: how it ends, and what it says then."""

import contextlib
import logging
import os
import sys
import traceback
from typing import NoReturn

from trainclient.checkpoint.state import SaveError
from trainclient.exchange.lost_ranks import RankLostError, is_out_of_memory, plain_text
from trainclient.report import FAILURE, USER_ERROR, report
from trainclient.training.config import TrainConfig
from trainclient.training.control_channel import RunEndedError
from trainclient.training.errors import TrainingError
from trainclient.training.rank import Process, run_rank
from trainclient.training.signals import StopSignals
from trainclient.training.traceback_frames import is_users

_log = logging.getLogger(__name__)


def run_worker(config: TrainConfig) -> NoReturn:
    """Train as one of torchrun's processes, and end this process.

    It ends at once. After a failure an orderly exit may wait for processes that are gone; after a success a thread of
    gloo may still ask for the lock of an interpreter that ends, which aborts the process. Signals stay noted until
    then, because torchrun ends the others as soon as the first one is gone.
    """
    with StopSignals(config.stop_grace_s) as stop:
        code = 0
        try:
            run_rank(config, Process.from_environment(os.environ), stop)
        except Exception as error:
            code = _explain(error, os.environ["RANK"], stop)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # its reader is gone
                stream.flush()
        os._exit(code)


def _explain(error: Exception, rank: str, stop: StopSignals) -> int:
    """Say on stderr why a rank fails, unless another rank or the user has the reason; returns the exit code."""
    name = f"trainclient rank {rank}"
    if isinstance(error, TrainingError | SaveError):  # all ranks raise it
        return report("trainclient", error, FAILURE) if rank == "0" else FAILURE
    if isinstance(error, RunEndedError):  # one of those that know says it; torchrun has asked all to stop by then
        return report("trainclient", error, FAILURE) if error.reports else FAILURE
    if isinstance(error, RankLostError) and stop.requested:
        return FAILURE
    if is_out_of_memory(error):
        return report(name, RuntimeError(_without_memory(error)), FAILURE)
    code = USER_ERROR if isinstance(error, ValueError) else FAILURE
    if location := _user_code_location(error):
        return report(name, RuntimeError(f"{type(error).__name__} in {location}: {plain_text(error)}"), code)
    if isinstance(error, ValueError):
        return report(name, error, code)
    if isinstance(error, RuntimeError | OSError):
        return report(name, error, FAILURE)
    _log.critical("%s has a defect", name, exc_info=error)
    return FAILURE


def _user_code_location(error: Exception) -> str:
    """Where in code of the user's own, such as a module, an error arose; empty if nowhere there."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _without_memory(error: Exception) -> str:
    """What could not be allocated, and what to change."""
    found = plain_text(error).split(". If reserved")[0].partition("\n")[0].rstrip(".") or "out of memory"
    return (
        f"{found}; have plans keep within the device (`trainclient memory` prints the fields for the job), or give the "
        "module recompute, sharding, or a higher tp or pp"
    )
