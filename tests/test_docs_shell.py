"""Every shell block of README, training, adapters and operations runs, on small data and with one rank a module.

bash reads the blocks. Their commands then run in processes that are forked, in the order of the page, servers first.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml
from builders.authority import TOKENS, Authority, token_file, write
from cli.forked import run_forked
from cli.preforked import PreforkedProcess
from cli.server_process import run
from page_data import write_page_data
from serving.harness import running
from shell_blocks import PAGES, Machine, ShellBlock, option, python_blocks, shell_blocks, small
from test_docs import BLOCK, ROOT
from training.released_folders import FAMILIES, VOCAB, base_folder, llama, siglip
from training.runs import variables

from dataserver.planning.job.fields.text import parse_yaml
from dataserver.security import NO_CREDENTIALS, Credentials

TIMEOUT_S = 200
NOT_RUN = {"scripts/demo": "it installs torch; `tests/scripts/test_setup.py` runs it with a pip that pretends"}
"""Blocks that are not run, by the first word, with the reason."""
NOT_HERE = {"pip": "the network"}
"""Programs whose lines are left out of a block, and what they need."""
MORE = {
    "top": {"--once": ["--once"], "--interval-s": ["--interval-s", "0.1"]},  # there is no terminal to redraw
    "train": {"--threads": ["--threads", "1"]},
}
"""What commands are given besides, by option."""
FEWER = {
    "--nnodes": "1",
    "--timeline.first": "0",
    "--timeline.steps": "1",
    "--dtype": "float32",
    **{f"--{kind}.preset": "tiny" for kind in ("encoder", "backbone", "generator")},
}
"""What some options are here."""
TESTED = {
    "with DataClient(": "test_docs_blocks.py",
    "import Dispatcher": "test_docs_blocks.py",
    "BlockEncoder": "modules/test_registry.py",
    "ServedTrainer": "adapters/test_huggingface.py",
    "ServedData(": "adapters/test_lightning.py",
    "ServedDataset(": "adapters/test_grain.py",
    "ServedDataLoader": "adapters/torchtitan_trainer.py",
    "served.is_distributed": "adapters/megatron_loop.py",
    "SampleSizes.of": "adapters/test_loader_planner.py",
    "ServedProvider(": "adapters/test_megatron_bridge.py",
}
"""Python blocks by something that they name, with the file of the test that finds them by it."""
BLOCKS = [
    pytest.param(block, id=f"{page}: {block.first}", marks=[pytest.mark.long] if "torchrun" in block.text else [])
    for page in PAGES
    for block in shell_blocks(page)
    if block.first.split()[0] not in NOT_RUN
]


def test_every_python_block_is_run_by_a_test() -> None:
    found = [[name for name in TESTED if name in text] for page in PAGES for text in python_blocks(page)]
    assert all(len(names) == 1 for names in found), found
    assert {name for names in found for name in names} == TESTED.keys()
    assert all(name in (ROOT / "tests" / file).read_text() for name, file in TESTED.items())


def test_blocks_that_are_not_run_are_there() -> None:
    """And blocks of shell are found at all: as many as there were, or more."""
    firsts = [block.first.split()[0] for page in PAGES for block in shell_blocks(page)]
    assert set(NOT_RUN) <= set(firsts)
    assert len(firsts) > 15


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the paths of the pages are: indexed data, and tiny models."""
    data = write_page_data(tmp_path_factory.mktemp("pages"))
    whole = base_folder(FAMILIES["qwen2-vl"], data / "whole")
    for folder, flags in (
        ("shards", ["--tokenizer", f"llama={data / 'tokenizer.json'}"]),
        ("chats", ["--conversations", "chat", "--tokenizer", f"qwen={whole}"]),
    ):
        assert run("index", data / folder, *flags).returncode == 0
    return {
        "/data/laion": data / "shards",
        "/data/llava": data / "chats",
        "/data/tokenizer.json": data / "tokenizer.json",
        "/models/Qwen2.5-VL-3B-Instruct": whole,
        "/hf/Qwen2.5-VL-3B-Instruct": whole,
        "/hf/Qwen3-0.6B": llama(data / "backbone", VOCAB),
        "/hf/siglip-base-patch16-224": siglip(data / "encoder", patch=14),
    }


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block: ShellBlock, paths: dict[str, Path], tmp_path: Path) -> None:
    found = paths | {f"/{name}": tmp_path / name for name in ("ckpt", "hf/trained", "models/tuned")}
    for indexed in re.findall(r"dataserver index (\S+)", block.text):
        found[indexed] = write_page_data(tmp_path) / found[indexed].name
    for output in ("hf", "models"):
        (tmp_path / output).mkdir()
    machine, processes = Machine.of(found), _write_jobs(block, tmp_path)
    commands = [_here(words, machine, processes) for words in block.commands(tmp_path) if words[0] not in NOT_HERE]
    servers = [words for words in commands if words[1] == "serve"]
    assert commands
    with ExitStack() as stack:
        for words in [words for words in commands if words[1] == "index"]:
            _run(words, tmp_path)
        if not servers and re.search(r"cpu1|train \.\.\.", block.text):
            stack.enter_context(_fleet(machine, tmp_path, secured="--tls-ca" in block.text))
        started: dict[str | None, subprocess.Popen[str]] = {}
        for words in servers:
            address = option(words, "--listen")
            if address in started:  # the block shows two ways to start the same server
                _end(started.pop(address))
            started[address] = _serve(words, tmp_path, stack)
        for words in [words for words in commands if words[1] not in ("index", "serve")]:
            _run(words, tmp_path)
        for process in started.values():
            _end(process)


def _write_jobs(block: ShellBlock, folder: Path) -> int:
    """Write the files that blocks name: jobs of the page, or else of the README. Returns the processes of the block's.

    All modules share one process, since each process costs seconds, except where torchrun starts them, and for
    `trainclient memory`: it does not divide the memory of devices that modules share, as those of `chats.yaml` do.
    """
    in_one_process = not re.search("torchrun|trainclient memory", block.text)
    pages = [] if "trainclient memory" in block.text else _jobs(block.page)
    texts = {"job.yaml": [*pages, *_jobs("README.md")][0]}
    texts["chats.yaml"] = next((text for text in pages if "# chats.yaml\n" in text), texts["job.yaml"])
    for name, text in texts.items():
        job = small(parse_yaml(text.encode()), in_one_process=in_one_process)
        (folder / name).write_text(yaml.safe_dump(job))
    (folder / "train.yaml").write_text("seed: 1\n")
    name = "chats.yaml" if "chats.yaml" in block.text else "job.yaml"
    execution = parse_yaml((folder / name).read_bytes())["execution"]
    return 1 if execution.get("layout", {}).get("kind") == "colocated" else len(execution["modules"])


def _jobs(page: str) -> list[str]:
    """The whole jobs on a page."""
    blocks = BLOCK.findall((ROOT / page).read_text())
    return [text for _, language, text in blocks if language == "yaml" and text.startswith("stream:")]


def _here(words: list[str], machine: Machine, processes: int) -> list[str]:
    """A command for this machine; `...` is what the page leaves out."""
    found = [machine.word(word) for word in words]
    if "..." in found:
        left_out = ["--job", "job.yaml", "--servers", machine.address(1)]
        if found[1] == "serve":
            shards, tokenizer = machine.paths["/data/laion"], machine.paths["/data/tokenizer.json"]
            left_out = ["--dataset", f"laion={shards}", "--tokenizer", f"llama={tokenizer}"]
            left_out += [] if "--listen" in found else ["--listen", machine.address(1)]
        at = found.index("...")
        found[at : at + 1] = left_out
    for name, value in {**FEWER, "--nproc-per-node": str(processes)}.items():
        if name in found:
            found[found.index(name) + 1] = value
    if found[0] == "torchrun" and "--rdzv-endpoint" not in found:
        found.insert(1, "--standalone")  # else it takes a port that is always the same
    more = MORE.get("train" if found[0] == "torchrun" else found[1], {})
    return [*found, *(word for name, words in more.items() if name not in found for word in words)]


@contextmanager
def _fleet(machine: Machine, folder: Path, *, secured: bool) -> Iterator[None]:
    """Servers of all data at the first two hosts; secured ones show certificates, and take a token."""
    credentials, config = NO_CREDENTIALS, {}
    if secured:
        authority = Authority(folder, "servers")
        write(folder / "token", f"{TOKENS['alice']}\n".encode())
        config = {**authority.server("server", "127.0.0.1", "127.0.0.2"), "token_file": token_file(folder, "alice")}
        credentials = Credentials(authority.file, token_file=folder / "token")
    datasets = {"laion": machine.paths["/data/laion"], "llava": machine.paths["/data/llava"]}
    model = machine.paths["/models/Qwen2.5-VL-3B-Instruct"]
    config["tokenizers"] = {"llama": machine.paths["/data/tokenizer.json"], "qwen": model}
    with ExitStack() as stack:
        for host in (1, 2):
            stack.enter_context(running(datasets, credentials=credentials, listen=machine.address(host), **config))
        yield


def _serve(words: list[str], folder: Path, stack: ExitStack) -> "subprocess.Popen[str]":
    """Start a server, and wait until it listens."""
    log = folder / "servers.log"
    errors = stack.enter_context(log.open("a"))
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    line = ["dataserver.__main__", *words[1:]]
    process = PreforkedProcess(line, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=folder)
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == f"listening on {option(words, '--listen')}\n", log.read_text()
    return process


def _end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT_S) == 0


def _run(words: list[str], folder: Path) -> None:
    """Run a command to its end, and look at what it made."""
    if words[0] == "torchrun":
        line = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        given = {"env": variables(), "cwd": folder, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
        done = subprocess.run(line, check=False, **given)
    else:
        done = run_forked(words, folder, variables(), TIMEOUT_S)
    finds = words[1] == "doctor"  # of a machine of tests it may say what to change
    assert done.returncode in ((0, 1) if finds else (0,)), f"{words}\n{done.stdout}\n{done.stderr}"
    assert "does not answer" not in done.stdout
    for name in ("--checkpoint.directory", "--timeline.directory"):
        if made := option(words, name):
            assert any((folder / made).iterdir()), f"{words} wrote nothing to {made}"
    if words[1] == "memory":
        modules = parse_yaml((folder / "job.yaml").read_bytes())["execution"]["modules"]
        told = yaml.safe_load(done.stdout)["modules"]
        assert [module["name"] for module in told] == [module["name"] for module in modules]
        assert all(module["memory"] for module in told)
    if words[1] == "export":
        assert (Path(str(option(words, "--output"))) / "model.safetensors").exists()
