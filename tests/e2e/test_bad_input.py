"""Whatever a user gets wrong: one line at the user's end that names what to change. Never a traceback, never a hang."""

import copy
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from cli.forked import run_forked
from cli.server_process import SAYS
from client.fake_server import Answers, FakeServer
from e2e.streams import dataset_flags, start_servers
from serving.harness import index
from shards import write_interleaved, write_pairs, write_tar

from dataserver.dataset.index.build import build_index
from trainclient.client import DataClient

HANG_S = 60
"""Every case ends within seconds; this is what tells a hang from a busy machine."""
BIN = Path(sys.executable).parent
JOB: Mapping[str, Any] = {
    "stream": {
        "datasets": [{"name": "pairs"}],
        "seq_len": 512,
        "global_batch": 8,
        "sizing": {"max_patches": 64},
    },
    "execution": {
        "modules": [{"name": "vit", "kind": "encoder"}, {"name": "llm", "kind": "backbone", "dp": 2, "pp": 2}],
        "end": {"steps": 3},
    },
}
UNUSED_ADDRESS = "127.0.0.1:1"

Changes = Mapping[str, Any]
"""Values by dotted path."""


@dataclass(frozen=True)
class Bad:
    """A command and what its one line must say."""

    command: str
    """Words with {names} of `World.names`."""
    says: tuple[str, ...]
    job: Changes = field(default_factory=dict)
    """What differs from JOB in {job}."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Other files, {by_name} in the command."""
    environment: Mapping[str, str] = field(default_factory=dict)


PLAN = "dataserver plan --job {job} --step 0 --dataset pairs={pairs} --dataset docs={docs}"
TRAIN = "trainclient train --job {job} --servers {server}"
MODULES = "execution.modules"
ENCODER = {"name": "vit", "kind": "encoder"}
BACKBONE = {"name": "llm", "kind": "backbone"}

DATASETS = {
    "serve a path that is not there": Bad("dataserver serve --dataset d={missing}", ("{missing}", "No such file")),
    "index a path that is not there": Bad("dataserver index {missing}", ("{missing}",)),
    "lint a path that is not there": Bad("dataserver lint {missing}", ("{missing}",)),
    "serve an empty folder": Bad("dataserver serve --dataset d={empty}", ("{empty}", ".tar")),
    "index an empty folder": Bad("dataserver index {empty}", ("{empty}", ".tar")),
    "serve shards without a sample": Bad("dataserver serve --dataset d={hollow}", ("no usable sample", "{hollow}")),
    "serve an index older than its shard": Bad(
        "dataserver serve --dataset d={stale}", ("00000.tar", "dataserver index {stale}")
    ),
    "plan over an index older than its shard": Bad(
        "dataserver plan --job {job} --step 0 --dataset pairs={stale}", ("00000.tar", "dataserver index {stale}")
    ),
    "serve without an index": Bad("dataserver serve --dataset d={plain}", ("index", "dataserver index {plain}")),
}
COMMANDS = {
    "serve a dataset without a name": Bad("dataserver serve --dataset {pairs}", ("NAME=PATH",)),
    "serve beyond this machine": Bad("dataserver serve --dataset d={pairs} --listen 0.0.0.0:0", ("--insecure",)),
    "serve beyond this machine with tokens alone": Bad(
        "dataserver serve --dataset d={pairs} --listen 0.0.0.0:0 --insecure --token-file {missing}",
        ("tokens would travel unencrypted", "tls_cert"),
    ),
    "serve beyond this machine to everybody": Bad(
        "dataserver serve --dataset d={pairs} --listen 0.0.0.0:0 --tls-cert {missing} --tls-key {missing}",
        ("everybody would be let in", "--client-ca"),
    ),
    "serve with a token file that others may read": Bad(
        "dataserver serve --dataset d={pairs} --token-file {tokens}",
        ("{tokens}", "others may read or write", "chmod 600"),
        files={"tokens": "a 0123456789abcdef0123456789abcdef"},
    ),
    "serve a certificate that is not there": Bad(
        "dataserver serve --dataset d={pairs} --tls-cert {missing} --tls-key {missing}",
        ("certificate {missing} cannot be read", "No such file"),
    ),
    "serve a certificate that is none": Bad(
        "dataserver serve --dataset d={pairs} --tls-cert {pem} --tls-key {missing}",
        ("private key {missing} cannot be read",),
        files={"pem": "hello"},
    ),
    "train with an authority that is not there": Bad(TRAIN + " --tls-ca {missing}", ("{missing}", "cannot be read")),
    "train with a certificate and no key": Bad(TRAIN + " --tls-cert {missing}", ("--tls-key", "belong together")),
    "serve on no address": Bad("dataserver serve --dataset d={pairs} --listen here", ("'here'", "HOST:PORT")),
    "unknown key in the server's file": Bad(
        "dataserver serve --config {config}",
        ("'decode_thread'", "decode_threads"),
        files={"config": "decode_thread: 3"},
    ),
    "wrong value in the server's file": Bad(
        "dataserver serve --dataset d={pairs} --config {config}",
        ("'max_streams' is 0", "1"),
        files={"config": "max_streams: 0"},
    ),
    "unknown key in the trainer's file": Bad(
        TRAIN + " --config {config}", ("optimizer.learning_rate",), files={"config": "optimizer: {learning_rate: 1}"}
    ),
    "no job": Bad("trainclient train --servers {server}", ("--job",)),
    "no job file": Bad("trainclient train --job {missing} --servers {server}", ("{missing}", "--job")),
    "a key twice in the server's file": Bad(
        "dataserver serve --dataset d={pairs} --config {config}",
        ("{config}", "'max_streams' stands twice", "line 2"),
        files={"config": "max_streams: 1\nmax_streams: 2"},
    ),
    "a key twice in the trainer's file": Bad(
        TRAIN + " --config {config}", ("{config}", "'seed' stands twice"), files={"config": "seed: 1\nseed: 2"}
    ),
    "a key twice in a job": Bad(
        "trainclient train --job {bad} --servers {server}",
        ("{bad}", "'stream' stands twice"),
        files={"bad": "stream: {}\nstream: {}"},
    ),
    "plan of a job with a key twice": Bad(
        "dataserver plan --job {bad} --step 0 --dataset d={pairs}",
        ("{bad}", "'stream' stands twice"),
        files={"bad": "stream: {}\nstream: {}"},
    ),
    "a job that is no YAML": Bad("trainclient train --job {bad} --servers {server}", ("{bad}",), files={"bad": "a: ["}),
    "plan of a job that is no YAML": Bad(
        "dataserver plan --job {bad} --step 0 --dataset d={pairs}", ("{bad}",), files={"bad": "a: ["}
    ),
    "no servers": Bad("trainclient train --job {job}", ("--servers",)),
    "no address at all": Bad("trainclient train --job {job} --servers localhost", ("'localhost'", "HOST:PORT")),
    "a step beyond the end": Bad(PLAN.replace("--step 0", "--step 3"), ("step 3", "ends after step 2")),
}
UNREACHABLE = {
    "nobody listens": Bad(
        "trainclient train --job {job} --first-answer-s 3 --servers " + UNUSED_ADDRESS,
        (UNUSED_ADDRESS, "for 3 s; check the addresses"),
    ),
    "a host that does not exist": Bad(
        "trainclient train --job {job} --first-answer-s 3 --servers no-such-host.invalid:50051",
        ("no-such-host.invalid:50051", "for 3 s; check the addresses"),
    ),
    "a server that does not speak": Bad(
        "trainclient train --job {job} --first-answer-s 3 --servers {silent}", ("{silent}", "check the addresses")
    ),
}
OTHER_SERVERS = {
    "a server of another API": Bad(
        "trainclient train --job {job} --servers {other_api}", ("{other_api}", "disttrain.v1", "matching release")
    ),
    "servers of another version": Bad(
        "trainclient train --job {job} --servers {other_version}", ("{other_version}", "order_version", "[3]")
    ),
}
JOBS = {
    "unknown key": ({"stream.seq_length": 512}, ("stream.seq_length",)),
    "unknown dataset": ({"stream.datasets": [{"name": "laion"}]}, ("'laion'", "['docs', 'pairs'")),
    "wrong fingerprint": (
        {"stream.datasets": [{"name": "pairs", "fingerprint": "0" * 64}]},
        ("'pairs'", "fingerprint", "0" * 64),
    ),
    "a filter over no column": (
        {"stream.datasets": [{"name": "pairs", "filter": "wdith >= 256"}]},
        ("'wdith'", "width"),
    ),
    "a filter that leaves nothing": (
        {"stream.datasets": [{"name": "pairs", "filter": "width >= 25600"}]},
        ("pairs", "filter"),
    ),
    "no ranks": ({MODULES: [ENCODER, {**BACKBONE, "dp": 0}]}, ("modules.1.dp", "greater than or equal to 1")),
    "stages of an encoder": ({MODULES: [{**ENCODER, "pp": 2}, BACKBONE]}, ("vit", "only backbone and tower modules")),
    "two backbones": ({MODULES: [BACKBONE, {**BACKBONE, "name": "other"}]}, ("one backbone",)),
    "a batch that does not divide": ({"stream.global_batch": 9}, ("global_batch 9", "multiple of 2")),
    "a batch smaller than the ranks": ({MODULES: [{**BACKBONE, "dp": 16}]}, ("global_batch 8", "multiple of 16")),
    "a sample that cannot fit": (
        {"stream.datasets": [{"name": "docs"}], "stream.seq_len": 40},
        ("docs", "seq_len is 40", "raise seq_len, lower sizing.max_patches"),
    ),
    "images without an encoder": ({MODULES: [{**BACKBONE, "dp": 2}]}, ("pairs", "encoder")),
    "generation without a generator": ({"stream.generation": {"ratio": "0.5"}}, ("generator", "ratio")),
    "an unknown tokenizer": ({"stream.tokenizer": {"name": "llama"}}, ("'llama'", "--tokenizer llama=FILE")),
    "another version": ({"stream.order_version": 3}, ("order_version 3", "[1, 2]")),
    "a fraction that is none": ({"stream.packing": {"fill": "much"}}, ("stream.packing.fill", "'much'")),
    "a fraction as a float": ({"stream.packing": {"fill": 0.9}}, ("stream.packing.fill", "0.9", "put it in quotes")),
    "a number as a text": ({"stream.seq_len": "512"}, ("stream.seq_len", '"512"', "without quotes")),
    "a layout that is none": ({"execution.layout": {"kind": "ring"}}, ('"ring"', "one of", "colocated", "contrastive")),
    "too small a vocabulary": (
        {"stream.tokenizer": {"vocab_size": 256}},
        ("tokenizer.vocab_size is 256", "at least 262", "leave it out"),
    ),
    "a tokenizer of another file": (
        {"stream.tokenizer": {"name": "bytes", "digest": "0" * 64}},
        ("tokenizer bytes", "0" * 64, "leave digest out"),
    ),
    "no end": ({"execution.end": {}}, ("end.steps", "end.epochs")),
}
TRAINER = {
    "tokens not counted": Bad(
        TRAIN,
        ("not counted", "dataserver index {uncounted}", "--tokenizer bytes"),
        {"stream.datasets": [{"name": "uncounted"}]},
    ),
    "more stages than layers": Bad(TRAIN, ("4 layers", "lower pp"), {MODULES: [ENCODER, {**BACKBONE, "pp": 100}]}),
    "tensor parallelism": Bad(TRAIN, ("llm", "tp 3", "heads 4"), {MODULES: [ENCODER, {**BACKBONE, "tp": 3}]}),
    "an unknown preset": Bad(TRAIN + " --backbone.preset llama4", ("llama4", "llama3-7b")),
    "another number of processes": Bad(
        TRAIN,
        ("7", "5", "--nproc"),
        environment={"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "7", "WORLD_SIZE": "7"},
    ),
    "half of torchrun": Bad(TRAIN, ("torchrun", "RANK"), environment={"RANK": "0"}),
}


@dataclass(frozen=True)
class World:
    """What the commands name."""

    names: Mapping[str, str]

    def run(self, bad: Bad, folder: Path, installed: bool) -> subprocess.CompletedProcess[str]:
        """Run a command: as it is installed, or in a process that has its imports already."""
        names = {**self.names, "job": str(folder / "job.yaml")}
        (folder / "job.yaml").write_text(yaml.safe_dump(changed(bad.job)))
        for name, text in bad.files.items():
            names[name] = str(folder / f"{name}.yaml")
            Path(names[name]).write_text(text)
        words = [word.format(**names) for word in bad.command.split()]
        environment = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1", **bad.environment}
        if not installed:
            return run_forked(words, folder, environment, HANG_S)
        return subprocess.run(
            [str(BIN / words[0]), *words[1:]],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            env=environment,
            cwd=folder,
            check=False,
        )

    def check(self, bad: Bad, folder: Path, installed: bool = False) -> None:
        """One line on stderr, with all that it must say, behind what the command says it begins with."""
        done = self.run(bad, folder, installed)
        assert done.returncode in (1, 2), done
        assert "Traceback" not in done.stdout + done.stderr
        lines = [line for line in done.stderr.splitlines() if not SAYS.match(line)]
        assert len(lines) == 1, done
        line = lines[0]
        assert line.startswith(("dataserver: ", "trainclient: ", "trainclient rank 0: ")), line
        names = {**self.names, **{name: str(folder / f"{name}.yaml") for name in bad.files}}
        for words in bad.says:
            assert words.format(**names) in line


def changed(changes: Changes) -> dict[str, Any]:
    """JOB with other values."""
    data = copy.deepcopy(dict(JOB))
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = data
        for parent in parents:
            place = place[parent]
        place[last] = value
    return data


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("world")
    folders = {
        "pairs": index(write_pairs(root / "pairs", 24, 8)),
        "docs": index(write_interleaved(root / "docs", 16, 8)),
        "uncounted": write_pairs(root / "uncounted", 4, 4),
    }
    build_index(folders["uncounted"], workers=1)
    with ExitStack() as stack:
        (server,) = start_servers(stack, dataset_flags(folders), 1)
        other_version = stack.enter_context(FakeServer(Answers(info={"order_versions": [3]}))).address
        with silent_address() as silent, other_api_address() as other_api:
            yield World(
                {
                    **{name: str(folder) for name, folder in (folders | odd_folders(root)).items()},
                    "missing": str(root / "missing"),
                    "server": server,
                    "silent": silent,
                    "other_api": other_api,
                    "other_version": other_version,
                }
            )


def odd_folders(root: Path) -> dict[str, Path]:
    """Datasets that cannot be served: by name in the commands."""
    (root / "empty").mkdir()
    (root / "empty" / "readme.txt").write_text("no shards here")
    write_tar(root / "hollow" / "00000.tar", [("a.json", b"{}")])
    build_index(root / "hollow", workers=1)
    stale = index(write_pairs(root / "stale", 4, 4))
    write_pairs(stale, 6, 4, seed=9)
    plain = write_pairs(root / "plain", 4, 4)
    return {"empty": root / "empty", "hollow": root / "hollow", "stale": stale, "plain": plain}


@contextmanager
def silent_address() -> Iterator[str]:
    """A port that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def other_api_address() -> Iterator[str]:
    """A gRPC server that has none of our methods."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("name", ["serve a dataset without a name", "no servers"])
def test_commands_as_they_are_installed(world: World, tmp_path: Path, name: str) -> None:
    world.check(COMMANDS[name], tmp_path, installed=True)


@pytest.mark.parametrize("name", DATASETS)
def test_datasets(world: World, tmp_path: Path, name: str) -> None:
    world.check(DATASETS[name], tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_and_files(world: World, tmp_path: Path, name: str) -> None:
    world.check(COMMANDS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNREACHABLE)
def test_addresses_where_no_server_is(world: World, tmp_path: Path, name: str) -> None:
    world.check(UNREACHABLE[name], tmp_path)


@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_servers_of_other_releases(world: World, tmp_path: Path, name: str) -> None:
    world.check(OTHER_SERVERS[name], tmp_path)


@pytest.mark.parametrize("name", JOBS)
def test_plans_of_jobs(world: World, tmp_path: Path, name: str) -> None:
    changes, says = JOBS[name]
    world.check(Bad(PLAN, says, changes), tmp_path)


@pytest.mark.parametrize("name", JOBS)
def test_training_of_jobs(world: World, tmp_path: Path, name: str) -> None:
    changes, says = JOBS[name]
    world.check(Bad(TRAIN, says, changes), tmp_path)


@pytest.mark.parametrize(("module", "rank"), [("llm", 2), ("llm", -1), ("vit", 1), ("dit", 0)])
def test_ranks_and_modules_that_the_job_has_not(world: World, module: str, rank: int) -> None:
    with pytest.raises(ValueError, match=module) as raised:
        DataClient(world.names["server"], JOB, module, rank)
    assert ("its dp is" in str(raised.value)) or ("it has ['vit', 'llm']" in str(raised.value))


@pytest.mark.parametrize("name", TRAINER)
def test_trainer(world: World, tmp_path: Path, name: str) -> None:
    world.check(TRAINER[name], tmp_path)
