"""Data connections of the client in JavaScript, cut or changed; its other tests have whole ones."""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.server_process import TIMEOUT_S, serving
from client.meddler import Meddling, after, cut, flipped, meddler
from foreign import node
from foreign.conftest import Case
from ports import free_addresses

pytestmark = pytest.mark.usefixtures("javascript")
FAR = "127.0.0.9"
"""An address of the server's machine that its data port does not listen on: what lies between does."""


@contextmanager
def between(case: Case, meddling: Meddling) -> Iterator[str]:
    """A server with something between it and its data port; the address for clients."""
    (data,) = free_addresses(1)
    flags = ["--listen", "0.0.0.0:0", "--insecure", "--data-listen", data, *case.flags]
    with serving(*flags) as server, meddler(FAR, int(data.rpartition(":")[2]), meddling):
        yield f"{FAR}:{server.address.rpartition(':')[2]}"


@pytest.mark.parametrize(
    ("meddling", "cause"),
    [(after(20_000, cut), "closed early"), (after(70_000, flipped), "CRC-32C|announced")],
)
def test_the_same_stream_goes_on_with_chunks(case: Case, meddling: Meddling, cause: str) -> None:
    with between(case, meddling) as address:
        line = node.command([address], case.job, "--codec", "raw", "--module", "vit", "--rank", "0")
        done = subprocess.run(line, capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=True)
    lines = [*map(node.json.loads, done.stdout.splitlines())][1:]
    expected = [node.content(line) for line in case.undisturbed.view("vit", 0)]
    assert [node.content(line) for line in lines] == expected
    warnings = done.stderr.splitlines()
    assert len(warnings) == 1
    for warning in warnings:
        assert warning.startswith(f"payloads of {address} come over gRPC, since the data connection is of no use: ")
        assert any(text in warning for text in cause.split("|")), warning


def test_a_stream_that_has_ended_is_opened_again_for_what_its_data_connection_lost(case: Case, tmp_path: Path) -> None:
    """Without a data connection, which might end so again."""
    lost: list[int] = []

    def drained(server: socket.socket, _client: socket.socket) -> None:
        while piece := server.recv(1 << 16):
            lost.append(len(piece))

    job = json.loads(case.job.read_text())
    job["execution"]["end"] = {"steps": 2}  # so that the server writes all of it before it sees the end
    file, view = tmp_path / "job.json", ("--codec", "raw", "--module", "vit", "--rank", "0")
    file.write_text(json.dumps(job))
    with between(case, drained) as address:
        expected = node.read([address.replace(FAR, "127.0.0.1")], file, *view)
        assert not lost
        found = node.read([address], file, *view)
    assert found.contents() == expected.contents()
    assert lost
