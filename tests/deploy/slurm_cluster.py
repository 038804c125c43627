"""A real Slurm on this machine: a controller and five nodes, each a daemon with a port of its own."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
NODES = 5
WAIT_S = 120


def missing() -> str:
    """Why there can be no such cluster; empty where there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install --no-install-recommends slurm-wlm munge"
    return "" if os.geteuid() == 0 else "daemons of Slurm need root"


PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


@dataclass
class Slurm:
    """A cluster that runs."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]]

    @property
    def variables(self) -> dict[str, str]:
        """Of commands that talk to it."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Run a command of Slurm; what it prints."""
        done = subprocess.run(
            command, env=self.variables | variables, capture_output=True, text=True, check=False, timeout=60
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.strip()

    def states(self, job: str) -> set[str]:
        """Of the components of a job; none where Slurm has forgotten it."""
        found = self.run("scontrol", "show", "job", "--oneliner", job, check=False)
        return {word.partition("=")[2] for word in found.split() if word.startswith("JobState=")}

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self.start(name, ["slurmd", "-D", "-c", "-N", name])

    def start(self, name: str, command: list[str]) -> None:
        """Start a daemon."""
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.daemons[name] = subprocess.Popen(command, env=self.variables, **output)  # type: ignore[call-overload]

    def kill_node(self, name: str) -> int:
        """Lose a node: its daemon, and all processes of its tasks; how many these were."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait()
        return self.kill_tasks(name)

    def kill_tasks(self, name: str) -> int:
        """End all processes of a node's tasks, parents first; how many these were."""
        tasks = [process for process in psutil.process_iter() if self._is_of(process, name)]
        for process in sorted(tasks, key=lambda process: process.pid):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return len(tasks)

    def _is_of(self, process: psutil.Process, node: str) -> bool:
        try:
            found = process.environ()
        except psutil.Error:
            return False
        return (found.get("SLURMD_NODENAME"), found.get("SLURM_CONF")) == (node, self.variables["SLURM_CONF"])

    def logs(self) -> str:
        """The ends of the logs of all daemons."""
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(self.folder.glob("*.log")))


def until(done: Callable[[], bool], why: Callable[[], str], seconds: float = WAIT_S) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, why()
        time.sleep(0.2)


@contextmanager
def slurm(folder: Path, cpus: int = 4) -> Iterator[Slurm]:
    """Start a cluster whose nodes n0 to n4 are idle."""
    folder.mkdir()
    ports = free_ports(NODES + 1)
    (folder / "slurm.conf").write_text(_configuration(folder, ports, cpus))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    cluster = Slurm(folder, {})
    munged = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder / 'munge.socket'}"]
    munged += [f"--pid-file={folder / 'munge.pid'}", f"--seed-file={folder / 'munge.seed'}"]
    commands = {"munged": [*munged, f"--log-file={folder / 'munged.log'}"], "slurmctld": ["slurmctld", "-D", "-c"]}
    try:
        for name, command in commands.items():
            cluster.start(name, command)
            if name == "munged":
                until((folder / "munge.socket").exists, cluster.logs)
        for n in range(NODES):
            cluster.start_node(f"n{n}")
        ready = ("sinfo", "--noheader", "--format=%D", "--states=idle")
        until(lambda: cluster.run(*ready, check=False) == str(NODES), cluster.logs)
        yield cluster
    finally:
        cluster.run("scancel", "--user=root", check=False)
        for daemon in reversed(cluster.daemons.values()):
            daemon.terminate()
        for n in range(NODES):  # a cancelled job's tasks get some seconds, which a failed test does not wait for
            cluster.kill_tasks(f"n{n}")
        for daemon in cluster.daemons.values():
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _configuration(folder: Path, ports: list[int], cpus: int) -> str:
    host = socket.gethostname()
    nodes = "\n".join(
        f"NodeName=n{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n + 1]} CPUs={cpus} RealMemory=4000"
        for n in range(NODES)
    )
    return f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder / "munge.socket"}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
StateSaveLocation={folder / "state"}
SlurmdSpoolDir={folder / "spool"}.%n
SlurmctldPidFile={folder / "slurmctld.pid"}
SlurmdPidFile={folder / "slurmd"}.%n.pid
SlurmctldLogFile={folder / "slurmctld.log"}
SlurmdLogFile={folder / "slurmd"}.%n.log
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
