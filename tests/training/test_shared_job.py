"""One process of a run has its job filled in, the others take it from there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from client.fake_server import FINGERPRINT, FakeServer, job_data
from ports import free_ports

from trainclient.topology.process_grid import TopologyError
from trainclient.training.config import TrainConfig
from trainclient.training.rank import Process, shared_jobs

REPOSITORY = Path(__file__).resolve().parents[2]
OTHER = """
import sys
from trainclient.training.config import TrainConfig
from trainclient.training.rank import Process, shared_jobs

config = TrainConfig(job=sys.argv[1], servers="127.0.0.1:1", timeout_s=30)
jobs, layout, _ = shared_jobs(config, Process(int(sys.argv[2]), 0, 1, 3))
print(jobs.training.job_id, layout.world_size)
"""


def test_only_the_first_process_asks_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(*free_ports(1)))
    others = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER, str(file), str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=dict(os.environ),
        )
        for rank in (1, 2)
    ]
    try:
        with FakeServer() as server:
            config = TrainConfig(job=file, servers=server.address, timeout_s=30)
            jobs, _, store = shared_jobs(config, Process(0, 0, 1, 3))  # in which the others look
            job = jobs.training
            assert job.stream.datasets[0].fingerprint == FINGERPRINT
            found = [process.communicate(timeout=60)[0] for process in others]
            del store
            assert found == [f"{job.job_id} 3\n"] * 2
            assert server.registrations == 1
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_a_wrong_number_of_processes_is_found_before_they_meet(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_data()))
    with FakeServer() as server:
        config = TrainConfig(job=file, servers=server.address)
        with pytest.raises(TopologyError, match="WORLD_SIZE is 7 but the job needs 3 processes"):
            shared_jobs(config, Process(0, 0, 1, 7))
