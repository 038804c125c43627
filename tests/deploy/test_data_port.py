"""All that is under `deploy/` names the data port wherever it says that servers run, or where they listen."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy.manifests import OVERLAYS, ROOT, of_kind, pods

from dataserver.serving.data_port import ABOVE_LISTEN

SERVES = re.compile(r"\b5005|--listen\b|FIRST_PORT|^(datasets|stream):$|\bdataserver (serve|ray)\b", re.MULTILINE)
"""Ports of gRPC, flags and variables for them, configurations of servers, and jobs."""
NAMED = re.compile(rf"\b{50051 + ABOVE_LISTEN}\b|\b{ABOVE_LISTEN} above\b")
"""The data port, or where it lies."""


def files() -> Iterator[Path]:
    """Those that start or configure servers, or let somebody reach them."""
    for path in sorted((ROOT / "deploy").rglob("*")):
        if path.is_file() and SERVES.search(path.read_text()):
            yield path


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT / "deploy"))) for path in files()])
def test_who_names_servers_names_their_data_port(path: Path) -> None:
    text = path.read_text()
    assert NAMED.search(text), f"{path}: no data port, as `{50051 + ABOVE_LISTEN}` or `{ABOVE_LISTEN} above`"


def test_every_kind_of_deployment_is_looked_at() -> None:
    found = {path.relative_to(ROOT / "deploy").parts[0] for path in files()}
    assert found == {"images", "kubernetes", "ray", "slurm", "systemd"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_and_services_open_both_ports(overlay: str) -> None:
    served = [{port["containerPort"] for port in pod.container.get("ports", ())} for pod in pods(overlay)]
    reached = [{port["port"] for port in service["spec"]["ports"]} for service in of_kind(overlay, "Service")]
    with_grpc = [ports for ports in (*served, *reached) if 50051 in ports]
    assert len(with_grpc) >= 2, "servers, and the service by which others find them"
    assert all(50051 + ABOVE_LISTEN in ports for ports in with_grpc)
