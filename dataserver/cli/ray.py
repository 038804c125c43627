"""`dataserver ray`: runs a fleet on a Ray cluster."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import tyro

from dataserver.addresses import joined, split_address
from dataserver.cli import logs
from dataserver.cli.end_signals import end_signals
from dataserver.cli.ray_cluster import RayError, connected
from dataserver.cli.ray_fleet import Configure, RayFleet
from dataserver.serving.budgets import budgets
from dataserver.serving.config import ServerConfig, load_config

LOOK_S: Final = 2.0
"""Time between two looks at the cluster."""


def ray(
    config: Annotated[Path, tyro.conf.arg(metavar="PATH", help_behavior_hint="(required)")],
    cores: int = 12,
    first_port: int = 50051,
) -> None:
    """Run a fleet on a Ray cluster: on each node one server for every --cores free cores. Lost servers are replaced.

    It prints `addresses HOST:PORT,...` whenever they change. Nodes that join get servers too. It runs until SIGTERM or
    Ctrl-C, which end all servers in order. Datasets must have the same paths on all nodes.

    Args:
        config: YAML file of `dataserver serve`. This command sets what differs between servers: addresses, peers,
            threads and, unless the file sets them, memory budgets.
        cores: Cores of each server.
        first_port: Port of the first server of each node; the next ones take the ports after it.
    """
    if cores < 1:
        raise RayError(f"--cores is {cores}; at least 1 is required")
    if not 1 <= first_port < 1 << 16:
        raise RayError(f"--first-port is {first_port}; a port from 1 to 65535 is required")
    settings = load_config(config, {})  # what is wrong with it is wrong everywhere
    logs.use(settings.log_format)
    with connected() as found, end_signals() as (next_signal, _):
        fleet = RayFleet(found, cores, first_port, configured(config, settings, cores, first_port))
        told: Sequence[str] = ()
        while True:
            fleet.look()
            if fleet.addresses != told:
                told = fleet.addresses
                print(f"addresses {','.join(told)}", flush=True)
            if next_signal(LOOK_S) is not None:
                break
        fleet.drain(settings.drain_grace_s)


def configured(file: Path, settings: ServerConfig, cores: int, first_port: int) -> Configure:
    """How servers are configured: as the file says, but for what differs between them."""

    def configure(address: str, addresses: tuple[str, ...], memory_bytes: float) -> ServerConfig:
        mine = budgets(int(memory_bytes))
        changes = {"listen": address, "peers": addresses, "decode_threads": cores}
        budgeted = {"prefetch_bytes": mine.prefetch_bytes, "job_bytes": mine.job_bytes}
        changes |= {key: value for key, value in budgeted.items() if key not in settings.model_fields_set}
        index = split_address(address)[1] - first_port
        for key in (
            "data_listen",
            "metrics_listen",
            "health_listen",
            "web_listen",
        ):  # a port for each server of a machine
            if (given := getattr(settings, key)) is not None:
                host, port = split_address(given)
                changes[key] = joined(host, port and port + index)
        return load_config(file, changes)

    return configure
