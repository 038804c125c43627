"""Ports that somebody else has: for a moment, or for good."""

import socket
import threading
from pathlib import Path

import pytest
from ports import free_ports
from serving.harness import running

from dataserver.serving import binding
from dataserver.serving.config import ConfigError


def taken() -> socket.socket:
    """A socket that listens at a port which no connection can get when it is closed."""
    [port] = free_ports(1)
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", port))
    listening.listen()
    return listening


@pytest.mark.parametrize("option", ["listen", "metrics_listen", "data_listen"])
def test_a_port_that_is_taken_for_a_moment_is_waited_for(
    datasets: dict[str, Path], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the server before this one, which a supervisor has just ended."""
    before = taken()
    address = f"127.0.0.1:{before.getsockname()[1]}"
    said = []

    def warned(text: str, *values: object) -> None:
        said.append(text % values)
        threading.Timer(0.5, before.close).start()

    monkeypatch.setattr(binding._log, "warning", warned)
    with running(datasets, **{option: address}) as server:
        data = f"127.0.0.1:{server.server.streams.shared.direct.port}"
        assert f"http://{address}/metrics" == server.server.metrics_url or address in (server.address, data)
    (line,) = said
    assert line.startswith(f"{address} is taken")
    assert line.endswith("; trying again for 5 s")


def test_a_port_that_stays_taken_is_an_error(datasets: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "RETRY_S", 0.3)
    with taken() as before:
        address = f"127.0.0.1:{before.getsockname()[1]}"
        for option, flag in (("listen", "--listen"), ("metrics_listen", "--metrics-listen")):
            with (
                pytest.raises(ConfigError, match=rf"{address}: Address already in use.*; choose .* with {flag}"),
                running(datasets, **{option: address}),
            ):
                pass


def test_what_waiting_does_not_mend_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waited"))
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:7: Cannot assign requested address; choose"):
        binding.when_free("192.0.2.1", 7, "--listen", lambda: binding.probe("192.0.2.1", 7))


def test_ports_of_connections_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As 50051 is on most machines."""
    monkeypatch.setattr(binding, "_EPHEMERAL", tmp_path / "range")
    assert binding.ephemeral(50051) == ""
    (tmp_path / "range").write_text("32768\t60999\n")
    assert binding.ephemeral(32767) == binding.ephemeral(61000) == ""
    assert "gives ports 32768 to 60999 to outgoing connections, too: listen below" in binding.ephemeral(50051)
    assert "net.ipv4.ip_local_reserved_ports=32768)" in binding.ephemeral(32768)
