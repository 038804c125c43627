"""A fleet, an index and a conversion on a real Ray cluster: several nodes on this machine, and one is lost."""

import gzip
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from benchmarks.range_server import State
from cli.server_process import command, refused, serving
from deploy.manifests import ROOT
from deploy.test_slurm import free_range
from ports import free_ports
from program.runtime_cases import Degrees
from serving.harness import index
from shards import write_pairs
from stores import no_stores, stores
from training.runs import Run, variables

from dataserver.addresses import split_address
from dataserver.cli.ray import configured
from dataserver.cli.ray_cluster import connected, results_alone
from dataserver.cli.ray_fleet import Member, RayFleet
from dataserver.dataset import DatasetError
from dataserver.serving.config import ConfigError, load_config

__all__ = ["no_stores", "stores"]

WAIT_S = 240
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'ray[train]'")


def server_file(folder: Path, dataset: Path, **more: Any) -> Path:
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump({"datasets": {"pairs": str(dataset)}, "insecure": True, **more}))
    return file


def test_servers_differ_in_what_must_differ_and_in_nothing_else(tmp_path: Path) -> None:
    ports = {"metrics_listen": "0.0.0.0:9464", "health_listen": "0.0.0.0:8080", "data_listen": "0.0.0.0:0"}
    file = server_file(tmp_path, tmp_path, **ports, job_bytes=1 << 27)
    given = load_config(file, {})
    configure = configured(file, given, 6, 50051)
    one = configure("10.0.0.1:50051", ("10.0.0.1:50051",), 8 << 30)
    other = configure("10.0.0.1:50053", ("10.0.0.1:50051", "10.0.0.1:50053"), 8 << 30)
    assert (one.listen, other.listen) == ("10.0.0.1:50051", "10.0.0.1:50053")
    assert (one.metrics_listen, other.metrics_listen) == ("0.0.0.0:9464", "0.0.0.0:9466")
    assert (one.health_listen, other.health_listen) == ("0.0.0.0:8080", "0.0.0.0:8082")
    assert (one.data_listen, other.data_listen) == ("0.0.0.0:0", "0.0.0.0:0"), "each takes a free port"
    assert other.peers == ("10.0.0.1:50051", "10.0.0.1:50053")
    assert (one.decode_threads, one.job_bytes, one.prefetch_bytes) == (6, 1 << 27, 1 << 30)
    assert configure("10.0.0.1:50051", ("10.0.0.1:50051",), 1 << 30).prefetch_bytes < 1 << 29
    different = {"listen", "metrics_listen", "health_listen", "peers", "decode_threads", "prefetch_bytes", "job_bytes"}
    for name in given.model_fields_set - different:
        assert getattr(one, name) == getattr(given, name)


def test_only_a_port_that_cannot_be_bound_is_given_up() -> None:
    fleet = RayFleet(SimpleNamespace(kill=lambda _: None), 1, 50051, lambda *_: load_config(None, {}))

    def fail(why: Exception) -> str:
        address = fleet._free_address("10.0.0.1")
        fleet.members[address] = member = Member(address, "node", None, None)
        fleet._failed(member, why)
        return address

    found = [
        fail(DatasetError("not mounted yet")),
        fail(ConfigError("its port is taken")),
        fleet._free_address("10.0.0.1"),
    ]
    assert found == ["10.0.0.1:50051", "10.0.0.1:50051", "10.0.0.1:50052"]


@pytest.mark.parametrize(("flag", "value"), [("--cores", "0"), ("--first-port", "70000")])
def test_wrong_flags_are_named(flag: str, value: str, tmp_path: Path) -> None:
    assert f"{flag} is {value}" in refused("ray", "--config", server_file(tmp_path, tmp_path), flag, value)


def test_without_a_cluster_there_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    said = refused("ray", "--config", server_file(tmp_path, tmp_path))
    assert "Ray is not installed" in said or "no Ray cluster can be reached" in said


def print_in_another_thread(*_: Any, **__: Any) -> None:
    other = threading.Thread(target=print, args=("(raylet) a node was lost",))
    other.start()
    other.join()


def test_only_the_thread_that_connected_prints_results(capsys: pytest.CaptureFixture[str]) -> None:
    with results_alone():
        sys.stdout.write("addresses cpu1:50051\n")
        print_in_another_thread()
    assert capsys.readouterr() == ("addresses cpu1:50051\n", "(raylet) a node was lost\n")


def test_what_ray_prints_as_it_begins_and_ends_is_no_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SimpleNamespace(init=print_in_another_thread, shutdown=print_in_another_thread)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with connected():
        sys.stdout.write("addresses cpu1:50051\n")
    assert capsys.readouterr() == ("addresses cpu1:50051\n", "(raylet) a node was lost\n" * 2)


def node_of(cpus: int) -> dict[str, int]:
    """A node with so many CPUs, and ports for its agents: raylets abort where an agent that chooses one is slow."""
    agents = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
    ports = dict(zip(agents, free_ports(len(agents)), strict=True))
    return {"num_cpus": cpus, "object_store_memory": 100 << 20, **ports}


@contextmanager
def ray_cluster(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> Iterator[Any]:
    """A head without CPUs, and nodes with so many."""
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    monkeypatch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
    monkeypatch.setenv("PYTHONPATH", variables()["PYTHONPATH"])
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=node_of(0))
    try:
        cluster.workers = [cluster.add_node(**node_of(number)) for number in cpus]
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()


class Fleet:
    """`dataserver ray` in another process."""

    def __init__(self, file: Path, log: Path, *flags: str) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command("ray", "--config", file, *flags), stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(line.strip() for line in self.process.stdout)

    def until(self, number: int, after: int = 0) -> list[str]:
        """Wait until so many servers are announced, in a line after so many; their addresses."""
        end = time.monotonic() + WAIT_S
        while True:
            for line in self.lines[after:]:
                word, _, addresses = line.partition(" ")
                assert word == "addresses", "nothing else is printed"
                if len(found := [address for address in addresses.split(",") if address]) == number:
                    return found
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, (self.lines, self.log.read_text())
            time.sleep(0.2)


@contextmanager
def ray_fleet(file: Path, tmp_path: Path, *flags: str) -> Iterator[Fleet]:
    fleet = Fleet(file, tmp_path / "fleet.log", "--first-port", str(free_range(8)), *flags)
    try:
        yield fleet
    finally:
        fleet.process.terminate()
        assert fleet.process.wait(120) == 0, fleet.log.read_text()
        fleet.reader.join(120)
        assert [line for line in fleet.lines if not line.startswith("addresses ")] == []


def steps_so_far(run: Run) -> list[int]:
    return [m["step"] for m in run.metrics()] if (run.folder / "metrics.jsonl").exists() else []


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_goes_on_when_a_node_is_lost_and_a_new_one_gets_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = index(write_pairs(tmp_path / "pairs", 120, 40, seed=3, median_size=64, formats=("PNG",)))
    degrees, steps = Degrees(1, 1, 1, 1, colocated=True), 8
    with serving("--dataset", f"pairs={folder}") as server:
        undisturbed = Run(server.address, tmp_path / "undisturbed")
        code, errors = undisturbed.train(degrees, "--steps", str(steps))
        assert code == 0, errors
    file = server_file(tmp_path, folder)
    with ray_cluster(monkeypatch, 2, 1) as cluster, ray_fleet(file, tmp_path, "--cores", "1") as fleet:
        assert len(set(fleet.until(3))) == 3
        run = Run("", tmp_path / "run")
        words = run.command(degrees, "--steps", str(steps))
        options = words[words.index("--job") :]
        del options[options.index("--servers") : options.index("--servers") + 2]
        with subprocess.Popen(
            [*words[:4], "--servers", ",".join(fleet.until(3)), *options],
            stderr=subprocess.PIPE,
            text=True,
            env=variables(),
        ) as trainer:
            end = time.monotonic() + WAIT_S
            while len(steps_so_far(run)) < 2:
                assert trainer.poll() is None, trainer.stderr.read() if trainer.stderr else ""
                assert time.monotonic() < end
                time.sleep(0.1)
            announced = len(fleet.lines)
            cluster.remove_node(cluster.workers[0], allow_graceful=False)
            assert len(steps_so_far(run)) < steps
            assert trainer.poll() is None, "the run is under way when the node goes"
            assert len(fleet.until(1, announced)) == 1
            cluster.add_node(**node_of(1))
            assert len(fleet.until(2, announced)) == 2
            _, errors = trainer.communicate(timeout=WAIT_S)
            assert trainer.returncode == 0, errors
    for ours, theirs in zip(run.metrics(), undisturbed.metrics(), strict=True):
        assert (ours["step"], ours["sample_digest"]) == (theirs["step"], theirs["sample_digest"])
        assert ours["text_loss"] == pytest.approx(theirs["text_loss"], rel=1e-9)


def listeners(addresses: Sequence[str]) -> dict[str, int]:
    """The process that serves each of some addresses."""
    listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    ports = {one.laddr.port: one.pid for one in listening}
    return {address: ports[split_address(address)[1]] for address in addresses}


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_server_whose_process_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node stays and gets another one, for which the address of the lost one is free."""
    folder = index(write_pairs(tmp_path / "pairs", 8, 8))
    file = server_file(tmp_path, folder)
    with ray_cluster(monkeypatch, 2) as cluster, ray_fleet(file, tmp_path, "--cores", "1") as fleet:
        killed, other = fleet.until(2)
        before, announced = listeners((killed, other)), len(fleet.lines)
        psutil.Process(before[killed]).kill()
        assert fleet.until(1, announced) == [other]
        after = listeners(found := fleet.until(2, announced))
        assert after[other] == before[other], "the other one goes on"
        assert before[killed] not in after.values()
        done = subprocess.run(command("doctor", ",".join(found)), capture_output=True, text=True, check=False)
        assert done.stdout.startswith("2 of 2 servers answer"), done
        assert [node["Alive"] for node in cluster.global_state.node_table()] == [True, True], "the head, and its node"


def ranks_of(run: Run) -> list[psutil.Process]:
    """The processes of a run's trainers; the parent of each is a worker of Ray."""
    found = psutil.process_iter(["cmdline"])
    job = str(run.folder / "job.yaml")
    return [one for one in found if {"trainclient", job} <= set(one.info["cmdline"] or ())]


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(900)
def test_ray_train_finds_the_servers_and_goes_on_when_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'")
    folder = index(write_pairs(tmp_path / "pairs", 120, 40, seed=3, median_size=64, formats=("PNG",)))
    file, steps = server_file(tmp_path, folder), 12
    run = Run("", tmp_path / "run")
    words = run.command(Degrees(2, 2, 1, 2, colocated=True), "--steps", str(steps))
    options = words[words.index("--job") :]
    del options[options.index("--servers") : options.index("--servers") + 2]
    with ray_cluster(monkeypatch, 2) as cluster, ray_fleet(file, tmp_path, "--cores", "2") as fleet:
        fleet.until(1)
        for _ in range(2):  # too small for a server, and so free for trainers
            cluster.add_node(**node_of(1))
        example = [sys.executable, ROOT / "deploy/ray/train.py", "--workers", "2", "--failures", "1"]
        with subprocess.Popen([*example, "--", *options], stderr=subprocess.PIPE, text=True) as trainer:
            end = time.monotonic() + WAIT_S
            while len(steps_so_far(run)) < 2:
                assert trainer.poll() is None, trainer.stderr.read() if trainer.stderr else ""
                assert time.monotonic() < end
                time.sleep(0.1)
            before = ranks_of(run)
            assert len(before) == 2
            before[0].parent().kill()
            _, errors = trainer.communicate(timeout=2 * WAIT_S)
        assert trainer.returncode == 0, errors[-4000:]
        assert not any(rank.is_running() for rank in before), "no rank outlives its worker"
    assert sorted(set(steps_so_far(run))) == list(range(steps))


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cluster_without_cores_or_without_servers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'")
    folder = index(write_pairs(tmp_path / "pairs", 8, 8))
    with ray_cluster(monkeypatch):
        done = subprocess.run(
            command("ray", "--config", server_file(tmp_path, folder)), capture_output=True, text=True, check=False
        )
        example = [sys.executable, ROOT / "deploy/ray/train.py", "--workers", "1", "--", "--job", tmp_path / "none"]
        trainer = subprocess.run(example, capture_output=True, text=True, check=False)
        for words in (["index", folder], ["convert", folder, tmp_path / "converted"]):
            tried = subprocess.run(command(*words, "--engine", "ray"), capture_output=True, text=True, check=False)
            assert tried.returncode == 2
            (line,) = [line for line in tried.stderr.splitlines() if line.startswith("dataserver: ")]
            assert "the Ray cluster has no CPUs; add a node" in line
            assert "Traceback" not in tried.stderr
    assert not (tmp_path / "converted").exists()
    assert (trainer.returncode, trainer.stderr.splitlines()[-1].split(";")[0]) == (
        1, "train.py: the Ray cluster has no data servers"
    ), trainer.stderr  # fmt: skip
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("dataserver: ")]
    assert "no node of the Ray cluster has 12 free cores" in line
    assert "Traceback" not in done.stderr


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_dataset_that_nodes_do_not_see_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_cluster(monkeypatch, 1):
        done = subprocess.run(
            command("ray", "--config", server_file(tmp_path, tmp_path / "none"), "--cores", "1"),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("dataserver: ")]
    assert "no server starts on the Ray cluster" in line
    assert str(tmp_path / "none") in line


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_index_of_a_bucket_is_that_of_one_machine(
    stores: tuple[State, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes read the bucket, and the machine of the command writes the index."""
    shards = write_pairs(tmp_path / "pairs", 48, 8, seed=3)
    for bucket in ("local", "ray"):
        stores[0].put_folder(f"/{bucket}/pairs", shards)
    subprocess.run(command("index", "s3://local/pairs"), check=True, capture_output=True)
    with ray_cluster(monkeypatch, 1, 1):
        done = subprocess.run(
            command("index", "s3://ray/pairs", "--engine", "ray"), capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "6 (6 indexed now)" in done.stdout
    found = {name: one.data for name, one in stores[0].objects.items() if not name.endswith((".tar", ".parquet"))}
    expected = {name for name in found if name.startswith("/local/")}
    assert {name.replace("/ray/", "/local/") for name in found.keys() - expected} == expected
    assert len(expected) > 12
    for name in expected:
        assert name.endswith("disttrain.flags") or found[name] == found[name.replace("/local/", "/ray/")], name


def tree(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def lose_at_work(cluster: Any, node: Any, process: subprocess.Popen[str]) -> None:
    """Take a node away while one of its workers is in the middle of a task."""
    (raylet,) = (one.process.pid for one in node.all_processes["raylet"])
    end = time.monotonic() + WAIT_S
    while (worker := at_work(psutil.Process(raylet))) is None:
        assert process.poll() is None, "it ended before a task of this node was seen"
        assert time.monotonic() < end
        time.sleep(0.002)
    try:
        cluster.remove_node(node, allow_graceful=False)
        assert process.poll() is None
    finally:
        worker.kill()


def at_work(raylet: psutil.Process) -> psutil.Process | None:
    """A worker of a node that has a task, and is stopped; None where none has."""
    for one in raylet.children():
        with suppress(psutil.NoSuchProcess):
            if has_task(one):
                one.suspend()
                if has_task(one):
                    return one
                one.resume()
    return None


def has_task(worker: psutil.Process) -> bool:
    name = " ".join(worker.cmdline())
    return name.startswith("ray::") and not name.startswith(
        ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
    )


@needs_ray
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", [False, True])
def test_index_and_convert_give_the_same_bytes_as_one_machine(
    lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = write_pairs(tmp_path / "pairs", 96, 8, seed=3)
    time.sleep(2.1)  # files that are indexed as they are written may be written once more
    packed = tmp_path / "packed"
    packed.mkdir()
    for tar in sorted(shards.glob("*.tar")):
        with tar.open("rb") as source, gzip.open(packed / f"{tar.name}.gz", "wb") as target:
            shutil.copyfileobj(source, target)
    subprocess.run(command("index", shards, "--index-dir", tmp_path / "local"), check=True, capture_output=True)
    subprocess.run(command("convert", packed, tmp_path / "tars"), check=True, capture_output=True)
    with ray_cluster(monkeypatch, *[1] * (3 if lost else 2)) as cluster:
        for arguments in (
            ["index", shards, "--index-dir", tmp_path / "ray"],
            ["convert", packed, tmp_path / "ray-tars"],
        ):
            with subprocess.Popen(
                command(*arguments, "--engine", "ray"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                if lost:
                    lose_at_work(cluster, cluster.workers.pop(0), process)
                _, errors = process.communicate(timeout=WAIT_S)
                assert process.returncode == 0, errors
    local, spread = tree(tmp_path / "local"), tree(tmp_path / "ray")
    assert len(local) > 12
    assert {name for name in local.keys() | spread.keys() if local.get(name) != spread.get(name)} == set()
    one, other = tree(tmp_path / "tars"), tree(tmp_path / "ray-tars")
    assert {n: one[n] for n in one if n.endswith(".tar")} == {n: other[n] for n in other if n.endswith(".tar")}
