"""Traces of some steps by torch's profiler, one for each process."""

import errno
import os
import sys
from pathlib import Path
from typing import Self

from torch.profiler import ProfilerActivity, profile

from dataserver.outputs import beside
from trainclient.checkpoint.lease import FollowedLease, Lease
from trainclient.topology.process_groups import Groups
from trainclient.training.config import ProfileConfig


class StepProfiler:
    """Profiles consecutive steps of one process; one that ends earlier leaves what there is."""

    def __init__(self, config: ProfileConfig, groups: Groups, lease: Lease | FollowedLease | None = None) -> None:
        """Profile as the configuration says; without a folder nothing is. The lease is the folder's."""
        self._directory = config.directory
        self._steps = config.profiled
        self._groups = groups
        self._lease = lease
        self._profile: profile | None = None

    def begin_step(self, step: int) -> None:
        """A step begins: with the first one to profile the trace does, and with the one after the last it ends."""
        if self._profile is not None and step not in self._steps:
            self._end()
        elif self._profile is None and self._directory is not None and step in self._steps:
            device = [ProfilerActivity.CUDA] if self._groups.device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *device], record_shapes=True)
            self._profile.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._end()

    def _end(self) -> None:
        """Write the trace. One that cannot be written is said, and no reason to end a run.

        Raises:
            LeaseLostError: another run has taken the folder over.
        """
        if self._profile is None or self._directory is None:
            return
        profiled, self._profile = self._profile, None
        profiled.stop()
        path = trace_path(self._directory, self._groups.rank)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with beside(path) as temp:
                try:
                    profiled.export_chrome_trace(str(temp))
                finally:  # its own temporary file, which it renames if all was written
                    temp.with_name(f"{temp.name}.tmp").unlink(missing_ok=True)
                if not temp.stat().st_size:  # it does not say that it could not
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if self._lease is not None:  # behind all that takes long
                    self._lease.require()
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            sys.stderr.write(f"the profile {path} is not written: {reason}\n")
            return
        if self._groups.rank == 0:
            sys.stderr.write(f"profiles are in {self._directory}; ui.perfetto.dev opens them\n")


def trace_path(directory: Path, rank: int) -> Path:
    """Where the trace of a global rank lies."""
    return directory / f"rank-{rank:05d}.json"
