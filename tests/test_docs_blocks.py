"""Commands and Python of the pages run, with paths and addresses of here; scripts of adapters have other tests."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tyro
from builders.chats import write_chat_folder
from page_data import write_page_data
from serving.harness import running
from test_docs import BLOCK, PAGES, ROOT, block_commands, commands

import dataserver.cli
import trainclient.cli
from dataserver.cli.parsing import parse
from dataserver.planning.job.fields.text import parse_yaml
from trainclient.checkpoint.export import ExportConfig
from trainclient.orchestrate.command import Orchestrate
from trainclient.orchestrate.profile_command import ProfileOptions
from trainclient.training.config import TrainConfig, validate_config
from trainclient.training.memory_command_config import SHOWN, MemoryConfig

RUN = {
    "docs/start.md": ["dataserver index", "dataserver plan"],
    "docs/datasets.md": ["dataserver index", "dataserver lint", "dataserver sizes"],
    "docs/planning.md": ["dataserver index", "dataserver plan", "dataserver simulate"],
    "docs/layouts.md": ["dataserver sizes", "trainclient orchestrate"],
}
"""By page, the commands that need neither a server nor a GPU."""
QUICKER = {"trainclient orchestrate": ["--steps", "0"]}
"""Options that are added: to plan what was solved for 96 GPUs takes more than a minute; `tests/orchestrate` plans for
fewer."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards and a tokenizer."""
    folder = write_page_data(tmp_path_factory.mktemp("docs"))
    assert dataserver.cli.main(["index", str(folder / "shards")]) == 0
    write_chat_folder(folder / "chat_model", "qwen2-vl")
    return folder


def here(argument: str, data: Path) -> str:
    """An argument with the paths of this machine."""
    argument = re.sub(r"=/models/\S+$", f"={data / 'chat_model'}", argument.replace("/data/llava", str(data / "chats")))
    argument = re.sub(r"=/\S+/tokenizer\.json$", f"={data / 'tokenizer.json'}", argument)
    return re.sub(r"(^|=)(/data/\w+|shards)$", rf"\1{data / 'shards'}", argument)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_commands_run(page: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jobs = [text for _, language, text in BLOCK.findall((ROOT / page).read_text()) if language == "yaml"]
    for job in jobs[:1]:
        Path("job.yaml").write_text(job)
    done = []
    for command, arguments in commands(ROOT / page):
        if command not in RUN[page] or "..." in arguments or not arguments or "NAME" in str(arguments):
            continue
        program, name = command.split()
        main = dataserver.cli.main if program == "dataserver" else trainclient.cli.main
        given = [*(here(argument, data) for argument in arguments), *QUICKER.get(command, [])]
        assert main([name, *given]) in (0, 1 if name == "lint" else 0)
        done.append(command)
    assert set(done) == set(RUN[page])


def test_servers_and_trainers_take_their_arguments() -> None:
    given = [(c.split(), a) for page in PAGES for c, a in commands(page) if "..." not in a and len(a) > 2]
    started = [
        parse(import_module("dataserver.cli.serve").serve, "dataserver serve", arguments)
        for (program, name), arguments in given
        if (program, name) == ("dataserver", "serve") and "NAME=FILE" not in arguments
    ]
    runs = [
        trainclient.cli._parse(arguments, TrainConfig, TrainConfig, "train", "")
        for (program, name), arguments in given
        if (program, name) == ("trainclient", "train")
    ]
    assert len(started) > 4
    assert len(runs) > 2


def test_commands_of_blocks_take_their_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text("seed: 1")
    given = {(c, *a) for page in PAGES if "internal" not in page.parts for c, a in block_commands(page)}
    whole = [(c, a) for c, *a in given if "..." not in a and c not in ("dataserver serve", "trainclient train")]
    for command, arguments in whole:
        program, name = command.split()
        if program == "dataserver":
            function = getattr(import_module(f"dataserver.cli.{name}"), dataserver.cli.COMMANDS[name].function)
            assert parse(function, command, arguments)
        elif name == "memory":
            assert trainclient.cli._parse(arguments, MemoryConfig, SHOWN, name, "")
        else:
            options: type = {"export": ExportConfig, "orchestrate": Orchestrate, "profile": ProfileOptions}[name]
            assert tyro.cli(options, args=arguments)
    assert len({command for command, _ in whole}) > 12


def test_configurations_of_the_trainer_are_valid() -> None:
    page = ROOT / "docs/training.md"
    found = [parse_yaml(text.encode()) for _, language, text in BLOCK.findall(page.read_text()) if language == "yaml"]
    for data in found:
        if data.keys() <= TrainConfig.model_fields.keys() and not isinstance(data.get("modules"), list):
            validate_config({"job": "job.yaml", "servers": "cpu1:50051", **data})


@pytest.mark.parametrize("page", ["README.md", "docs/adapters.md"])
def test_a_client_reads_its_microbatches(
    page: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (job,) = re.findall(r"```yaml\n(stream:.*?)```", (ROOT / "docs/planning.md").read_text(), re.DOTALL)
    Path("job.yaml").write_text(job)
    (code,) = (text for _, _, text in BLOCK.findall((ROOT / page).read_text()) if "with DataClient(" in text)
    with running({"pairs": data / "shards"}) as server:
        found: dict[str, object] = {}
        exec(code.replace("cpu1:50051,cpu2:50051", server.address), found)
    assert "patches" in found["batch"].tensors  # type: ignore[attr-defined]


def test_a_dispatcher_moves_rows_there_and_back() -> None:
    (code,) = (t for _, _, t in BLOCK.findall((ROOT / "docs/adapters.md").read_text()) if "import Dispatcher" in t)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        pixels, encoder = torch.randn(6, 3), torch.nn.Linear(3, 5)
        found = {"own_patches": [4, 2], "device": torch.device("cpu"), "pixels": pixels, "encoder": encoder}
        exec(code, found)
    finally:
        dist.destroy_process_group()
    assert torch.equal(found["embeddings"], encoder(pixels))  # type: ignore[arg-type]
