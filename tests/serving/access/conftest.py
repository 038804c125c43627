"""A server that knows its callers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from builders.authority import TOKENS, Authority, token_file, write
from serving.harness import Running, running

from dataserver.security import Channels, Credentials, files

POLICY = {
    "identities": [
        {"name": "trainer-a", "token": "alice", "datasets": ["pairs"]},
        {"name": "watcher", "token": "bob", "datasets": [], "rights": ["metrics"]},
        {"name": "operator", "token": "ops", "datasets": ["*"], "rights": ["admin"]},
        {"name": "servers", "token": "peers", "datasets": ["*"], "rights": ["read"]},
    ]
}
Serve = Callable[..., Running]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at whenever they are asked for, not once a second."""
    monkeypatch.setattr(files, "LOOK_EVERY_S", 0.0)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """File of the policy above."""
    return write(tmp_path / "policy.yaml", yaml.safe_dump(POLICY).encode())


@pytest.fixture
def serve(datasets: dict[str, Path], tmp_path: Path, policy: Path) -> Iterator[Serve]:
    """Starts servers of both datasets on loopback that ask for tokens, unless told otherwise."""
    with ExitStack() as stack:

        def start(credentials: Credentials | None = None, **config: Any) -> Running:
            fixed = {"token_file": token_file(tmp_path, *TOKENS), "policy": policy}
            shown = {} if credentials is None else {"credentials": credentials}
            return stack.enter_context(running(datasets, **shown, **{**fixed, **config}))

        yield start


@pytest.fixture
def calling(tmp_path: Path) -> Iterator[Callable[[Running, str | None], grpc.Channel]]:
    """Opens channels to a server, as somebody with a token of this name, or without one."""
    with ExitStack() as stack:

        def channel(server: Running, name: str | None) -> grpc.Channel:
            opened = Channels(token=None if name is None else lambda: TOKENS[name]).open(server.address)
            return stack.enter_context(opened)

        yield channel
