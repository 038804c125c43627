"""The heterogeneous job of `deploy/slurm`, on a real Slurm: it loses a node, is requeued, and goes on."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import yaml
from cli.server_process import serving
from deploy.manifests import ROOT
from deploy.slurm_cluster import missing, slurm, until
from program.runtime_cases import Degrees
from serving.harness import index
from shards import write_pairs
from training.runs import Run, variables

from dataserver.cli.config_flags import with_flags
from dataserver.cli.parsing import parse
from dataserver.serving.config import ServerConfig
from trainclient.cli import _parse
from trainclient.training.config import TrainConfig

FOLDER = ROOT / "deploy/slurm"
SCRIPT = FOLDER / "train.sbatch"
DEGREES = Degrees(1, 2, 1, 1)
STEPS = 10
SIZES = ("--nodes=2 --ntasks-per-node=1 --cpus-per-task=4", "--no-kill --nodes=3 --ntasks-per-node=2 --cpus-per-task=2")
"""Of the two components, on five nodes of four cores."""


def command_of(text: str, program: str) -> list[str]:
    """The arguments that a script gives a program, with its variables replaced."""
    (found,) = re.findall(rf"\b{program} ((?:.*\\\n)*.*)", text)
    words = re.sub(r"\$\(\(.*?\)\)", "67108864", found.replace("\\\n", " ").replace('"', ""))
    values = {"SERVERS": "n1:50051-50052", "SLURM_CPUS_PER_TASK": "2", "share": "67108864", "@": ""}
    return re.sub(r"\$\{?(\w+|@)\}?", lambda match: values.get(match[1], "x"), words).partition("||")[0].split()


def test_servers_and_trainers_take_what_the_scripts_give_them() -> None:
    found = []

    @with_flags(ServerConfig)
    def take(config: Path | None, flags: dict[str, object]) -> None:
        """Take flags."""
        found.append(flags)

    server = command_of((FOLDER / "server.sh").read_text(), "dataserver serve")
    parse(take, "dataserver serve", [word.replace("0.0.0.0:67108864", "0.0.0.0:50051") for word in server])()
    assert {"peers", "decode_threads", "prefetch_bytes", "job_bytes", "listen", "insecure"} <= found[0].keys()
    trainer = command_of(SCRIPT.read_text(), "trainclient train")
    assert _parse(trainer, TrainConfig, TrainConfig, "train", "").servers == "n1:50051-50052"


def test_the_scripts_are_valid_shell() -> None:
    for file in (SCRIPT, FOLDER / "server.sh"):
        done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_job_without_nodes_is_refused(tmp_path: Path) -> None:
    """As where it is run by hand, and Slurm says nothing of nodes."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n")
    scontrol.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS_PER_NODE_HET_GROUP_1": "1"}
    environment |= {f"SLURM_JOB_NODELIST_HET_GROUP_{n}": "" for n in (0, 1)} | {"SLURM_CPUS_PER_TASK_HET_GROUP_1": "1"}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("train.sbatch: Slurm names no nodes")
    assert len(done.stderr.splitlines()) == 1


def test_a_job_trains_on_all_its_nodes_and_meets_on_the_first(tmp_path: Path) -> None:
    """Programs of Slurm that say what a component of two nodes and one of one node are."""
    programs = {
        "scontrol": """case "$2" in
            hostnames) printf '%s\\n' $3 ;;
            *) sleep 0.05; echo "NodeName=$4 NodeAddr=$4.cluster Port=1" ;;
            esac""",
        "srun": 'case "$*" in *torchrun*) echo "$*" ;; esac',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {"NTASKS_PER_NODE_HET_GROUP_1": "2", "JOB_NODELIST_HET_GROUP_0": "g1 g2", "JOB_NODELIST_HET_GROUP_1": "c1"}
    given |= {"CPUS_PER_TASK_HET_GROUP_0": "4", "CPUS_PER_TASK_HET_GROUP_1": "4", "JOB_NUM_NODES_HET_GROUP_0": "2"}
    environment = (
        os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | {f"SLURM_{k}": v for k, v in given.items()}
    )
    environment |= {"SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "servers c1.cluster:50051-50052" in done.stdout
    assert "--nnodes=2" in done.stdout
    assert "--rdzv-endpoint=g1.cluster:29500" in done.stdout


def sized(text: str, sizes: Sequence[str]) -> str:
    """The script with other sizes of its components."""
    left = iter(sizes)
    found, count = re.subn(r"^#SBATCH (?=.*--nodes=).*$", lambda _: f"#SBATCH {next(left)}", text, flags=re.MULTILINE)
    assert count == len(sizes)
    return found


def free_range(count: int) -> int:
    """The first of some ports that nobody uses at any address, below those that outgoing connections get."""
    for first in range(20_000, 32_000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
            return first
    raise AssertionError("no ports are free")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(missing()), reason=missing() or "installed")
def test_a_job_loses_a_node_and_is_requeued_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    folder = index(write_pairs(tmp_path / "pairs", 120, 40, seed=3, median_size=64, formats=("PNG",)))
    with serving("--dataset", f"pairs={folder}") as server:
        undisturbed = Run(server.address, tmp_path / "undisturbed")
        code, errors = undisturbed.train(DEGREES, "--steps", str(STEPS))
        assert code == 0, errors
    run = Run("", tmp_path / "run")
    words = run.command(DEGREES, "--steps", str(STEPS))
    options = words[words.index("--metrics") :]
    serve = tmp_path / "serve.yaml"
    serve.write_text(yaml.safe_dump({"datasets": {"pairs": str(folder)}}))
    script = tmp_path / "train.sbatch"
    script.write_text(sized(SCRIPT.read_text(), SIZES))
    settings = {
        "JOB": str(run.folder / "job.yaml"),
        "SERVE_CONFIG": str(serve),
        "CHECKPOINTS": str(run.checkpoints),
        "PROCESSES_PER_NODE": "2",
        "FIRST_PORT": str(free_range(6)),
        "RENDEZVOUS_PORT": str(free_range(10) + 9),
        "PYTHONPATH": variables()["PYTHONPATH"],
        "TMPDIR": str(tmp_path),
    }
    output = tmp_path / "output"
    with slurm(tmp_path / "slurm") as cluster:
        paths = f"{Path(sys.executable).parent}:{cluster.variables['PATH']}"
        submit = ("sbatch", "--parsable", f"--output={output}", f"--chdir={FOLDER}", str(script), *options)
        job = cluster.run(*submit, **settings, PATH=paths)

        def said() -> str:
            return f"{output.read_text() if output.exists() else ''}\n{cluster.states(job)}\n{cluster.logs()}"

        def steps() -> int:
            return len(run.metrics()) if (run.folder / "metrics.jsonl").exists() else 0

        until(lambda: steps() >= 2, said, 300)
        assert cluster.kill_node("n2") >= 2, "two servers and their scripts"
        before = steps()
        until(lambda: steps() >= before + 2, said, 300)
        cluster.start_node("n2")
        cluster.run("scontrol", "requeue", job)
        until(lambda: cluster.states(job) == {"PENDING"}, said)
        cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")
        until(lambda: "restart 1" in output.read_text(), said, 240)
        until(lambda: cluster.states(job) <= {"COMPLETED", "FAILED"}, said, 400)
        assert cluster.states(job) == {"COMPLETED"}, said()
    assert "resum" in output.read_text().lower()
    found, expected = run.metrics(), undisturbed.metrics()
    assert [m["step"] for m in found] == list(range(STEPS))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["sample_digest"] == theirs["sample_digest"]
        assert ours["text_loss"] == pytest.approx(theirs["text_loss"], rel=1e-9), json.dumps(ours)
