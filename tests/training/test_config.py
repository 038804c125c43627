"""Configuration from YAML and flags, and what is said when it is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainclient.cli import main
from trainclient.training.config import ConfigError, RowsByHost, TrainConfig, load_config, validate_config
from trainclient.training.config_base import Options


def test_yaml_and_flags_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("servers: a:1\noptimizer: {lr: 0.5}\nencoder: {preset: vit-h, layers: 2}\ndtype: bfloat16\n")
    config = validate_config(load_config(file))
    assert config.optimizer.lr == 0.5
    assert (config.encoder.preset, config.encoder.layers) == ("vit-h", 2)
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {learning_rate: 1}", r"optimizer.learning_rate: this option is unknown"),
        ("sevrers: a:1", r"sevrers: this option is unknown"),
        ("optimizer: {lr: 0}", r"optimizer.lr: Input should be greater than 0"),
        ("dtype: float8", r"dtype: Input should be"),
        ("- a", r"holds a list; a mapping of options is required"),
        ("a: [", r"train.yaml cannot be used: not valid YAML"),
        ("seed: 1\nseed: 2", r"key 'seed' stands twice"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        validate_config(load_config(file))


def test_rows_go_through_hosts_in_the_first_step_unless_said_otherwise() -> None:
    assert TrainConfig().rows_by_host is RowsByHost.FIRST
    found = {kind: [kind.applies(first=first) for first in (True, False)] for kind in RowsByHost}
    assert found == {"never": [False, False], "first": [True, False], "always": [True, True]}


def test_required_inputs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--job"):
        TrainConfig().require_inputs()
    with pytest.raises(ConfigError, match="no job file"):
        TrainConfig(job=tmp_path / "none.yaml").require_inputs()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is a pipe, and several processes read the job; write it to a file"):
        TrainConfig(job=tmp_path / "pipe").require_inputs()
    (tmp_path / "job.yaml").write_text("")
    with pytest.raises(ConfigError, match="--servers"):
        TrainConfig(job=tmp_path / "job.yaml").require_inputs()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trian"],
            "trainclient: there is no command 'trian'; use train, export, checkpoints, orchestrate, profile or "
            "memory\n",
        ),
        (["train"], "trainclient: no job is given; add --job JOB.yaml"),
        (["train", "--servres", "a:1"], "trainclient: --servres is unknown; did you mean --servers?"),
        (["train", "--encoder.layers", "two"], "trainclient: --encoder.layers: 'two' is given, INT is required;"),
        (
            ["train", "--otlp-endpoint", "http://10.0.0.1:4317"],
            "trainclient: the configuration is not valid: otlp_endpoint: the collector of traces is "
            "http://10.0.0.1:4317, and traces and tokens would travel unencrypted",
        ),
        (["train", "--config", "none.yaml"], "trainclient: the configuration none.yaml cannot be read"),
    ],
)
def test_one_line_for_user_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(message)
    assert len(errors.splitlines()) == 1


def test_help_says_what_holds_without_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "that of the preset" in shown
    assert "None" not in shown


def test_help_breaks_no_line_where_the_source_does(capsys: pytest.CaptureFixture[str]) -> None:
    kinds: list[type[Options]] = [Options]
    for kind in kinds:
        kinds += kind.__subclasses__()
    texts = [str(field.description) for kind in kinds for field in kind.model_fields.values()]
    assert len(texts) > 50
    assert [text for text in texts if "\n" in text] == []
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "newest checkpoint in --checkpoint.directory, or" in capsys.readouterr().out


def test_help_of_memory_lists_what_memory_depends_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other options of a run are taken as well, but not listed."""
    with pytest.raises(SystemExit):
        main(["memory", "--help"])
    shown = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    assert {"--memory-gb", "--job", "--dtype", "--backbone.sharding", "--config"} < shown
    assert not [option for option in shown if re.match("--(metrics|optimizer|checkpoint|compile|steps)", option)]
    file = tmp_path / "run.yaml"
    file.write_text("metrics: lines.jsonl\nmemory_gb: 72\n")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["memory", "--config", str(file), "--optimizer.lr", "0.1"]) == 2
    assert "no job is given" in capsys.readouterr().err
    assert main(["memory", "--memory-gb", "0", "--config", str(file)]) == 2
    assert "--memory-gb: Input should be greater than 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_never_comes_is_waited_for_and_then_one_error(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("stream: {datasets: [{name: a}]}\nexecution: {}\n")
    command = [sys.executable, "-m", "trainclient", "train", "--job", str(job), "--servers", "127.0.0.1:1"]
    done = subprocess.run([*command, "--first-answer-s", "8"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    first, *waiting, error = done.stderr.splitlines()
    assert first == "train: asking the servers for the job, then loading torch"
    assert waiting
    for line in waiting:
        assert re.search(r"no server could be reached for \d+ s of 8 s: 127\.0\.0\.1:1: failed with UNAVAILABLE", line)
    assert error.startswith("trainclient: no server could be reached for 8 s; check the addresses")


def test_help_that_nobody_reads_to_its_end_is_no_failure_to_explain() -> None:
    command = [sys.executable, "-m", "trainclient", "train", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1
