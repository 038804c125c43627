"""The log of a real server, and of whatever can be logged, as JSON."""

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from cli.server_process import TIMEOUT_S, command, serving
from disttrain.v1 import data_service_pb2 as pb
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from serving.harness import index
from shards import write_pairs

from dataserver.cli.logs import JsonFormatter

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return index(write_pairs(tmp_path_factory.mktemp("logged") / "d", 8, 8))


def entries(text: str) -> list[dict[str, Any]]:
    """The log entries; every line must be one."""
    found = [json.loads(line) for line in text.splitlines()]
    for entry in found:
        assert entry.keys() - {"exception"} == {"time", "level", "logger", "process", "message"}
        assert TIME.fullmatch(entry["time"])
        assert all(isinstance(value, int if name == "process" else str) for name, value in entry.items())
    return found


def test_each_line_of_a_server_is_an_object(folder: Path) -> None:
    with serving("--dataset", f"d={folder}", "--log-format", "json", by_hand=True) as server:
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError):
            DataServiceStub(channel).GetPlan(pb.GetPlanRequest(job_id="none"), timeout=TIMEOUT_S)
        code, errors = server.end()
    assert code == 0
    found = entries(errors)
    assert found[0]["message"] == "serve: opening the datasets, then listening"
    assert any(re.match(r"dataset d: 1 shards, fingerprint \w{64}$", entry["message"]) for entry in found)
    assert {entry["level"] for entry in found} == {"INFO"}


@pytest.mark.parametrize("flag", [("--log-format", "json"), ("--log-format=json",)])
def test_what_the_user_must_put_right_is_an_object_too(flag: tuple[str, ...], tmp_path: Path) -> None:
    line = command("serve", "--dataset", f"d={tmp_path}/none", *flag)
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    last = entries(done.stderr)[-1]
    assert last["level"] == "ERROR"
    assert last["message"].startswith(f"dataset path {tmp_path}/none cannot be opened")


def test_a_file_can_ask_for_it(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"datasets: {{d: {folder}}}\nlog_format: json\n")
    with serving("--config", file) as server:
        _, errors = server.end()
    first, *others = errors.splitlines()
    assert first == "serve: opening the datasets, then listening"
    assert entries("\n".join(others))


def test_text_is_the_default(folder: Path) -> None:
    with serving("--dataset", f"d={folder}") as server:
        _, errors = server.end()
    assert re.search(
        r"^\d{4}-\d\d-\d\d \S+ INFO dataserver\.cli\.serve\[\d+\]: dataset d: 1 shards", errors, re.MULTILINE
    )


def logged(write: Any) -> dict[str, Any]:
    """The entry that one call of a logger makes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("some.logger")
    logger.addHandler(handler)
    write(logger)
    (entry,) = entries(stream.getvalue())
    return entry


@pytest.mark.parametrize("message", ["two\nlines\r\u2028\x00", '"quotes" \\ {', "\udcff lone", "100 % ü \U0001f600"])
def test_any_message_is_one_line(message: str) -> None:
    entry = logged(lambda logger: logger.warning("%s", message))
    said = message.replace("\udcff", "\\xff")  # of a name that is not UTF-8: strict readers of JSON refuse it
    assert (entry["message"], entry["level"], entry["logger"]) == (said, "WARNING", "some.logger")


def test_exceptions_have_their_traceback() -> None:
    def fail(logger: logging.Logger) -> None:
        try:
            raise ValueError("bad\nthing")
        except ValueError:
            logger.exception("failed")

    entry = logged(fail)
    assert entry["message"] == "failed"
    assert entry["exception"].startswith("Traceback (most recent call last):\n")
    assert entry["exception"].endswith("ValueError: bad\nthing")


UNCAUGHT = """
import threading, warnings
from dataserver.cli import logs
logs.start(["--log-format", "json"])
warnings.warn("odd")
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
raise KeyError("gone")
"""


def test_what_nobody_caught_is_logged() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 1
    warning, thread, main = entries(done.stderr)
    assert "odd" in warning["message"]
    assert thread["message"] == "thread worker ended by an exception"
    assert thread["exception"].endswith("ZeroDivisionError: division by zero")
    assert main["exception"].endswith("KeyError: 'gone'")
