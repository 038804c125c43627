"""`dataserver doctor`: checks a fleet, and says what to change."""

from collections.abc import Iterator, Mapping
from time import time
from typing import Final

from disttrain.v1.admin_service_pb2 import ListFailuresResponse

from dataserver.cli.arguments import Addresses, ServerCredentials, Switch, server_names
from dataserver.planning.plan.naming import counted
from dataserver.reporting.fleet_calls import NamedServers
from dataserver.reporting.fleet_checks import Finding, check, summary
from dataserver.reporting.fleet_failures import failed_in, unreadable
from dataserver.reporting.fleet_setup import failures, look
from dataserver.security import NO_CREDENTIALS, Channels

FOUND: Final = 1
"""Exit status where something is wrong."""
MAX_FAILED: Final = 20
"""Samples and shards that are named."""


def doctor(
    addresses: Addresses,
    insecure: Switch = False,
    credentials: ServerCredentials = NO_CREDENTIALS,
) -> int:
    """Check a fleet, and say what to change.

    It compares releases, builds, content digests, datasets, tokenizers, transforms and clocks, and checks certificates,
    limits of files, memory, disks and peers, and reads that failed within the last hour. It prints each finding with
    its remedy, then the samples and shards that failed. The exit status is 1 if there are findings. If servers have a
    policy, it needs the rights `read` and `metrics`.

    Args:
        addresses: HOST:PORT of servers, or HOST:FIRST-LAST for a range of ports, separated by spaces or commas.
        insecure: Do not report that others may reach servers without encryption or credentials.
        credentials: What to show the servers.
    """
    servers = NamedServers(server_names(addresses), Channels(credentials))
    fleet, silent = look(servers)
    told = failures(servers)
    findings = [Finding((name,), why, remedy) for name, (why, remedy) in silent.items()]
    now = time()
    findings += [*check(fleet, now, insecure=insecure), *unreadable(fleet, told, now)]
    print(summary(fleet, {name: why for name, (why, _) in silent.items()}))
    for finding in findings:
        print(finding)
    for line in _failed(told):
        print(line)
    print("nothing is wrong" if not findings else counted(len(findings), "finding"))
    return FOUND if findings else 0


def _failed(told: Mapping[str, ListFailuresResponse]) -> Iterator[str]:
    """The samples and shards that failed last; most of them are no fault of the fleet."""
    found = failed_in(told)
    for one in found[:MAX_FAILED]:
        sample = f", sample {one.key}" if one.key else ""
        where = one.servers[0] if len(one.servers) == 1 else f"{len(one.servers)} servers"
        times = "" if one.count == 1 else f", {one.count} times"
        what = f"dataset {one.dataset}, shard {one.shard}{sample}: {one.reason}"
        yield f"failed ({one.kind}) at {one.when}{times}: {what} ({where})"
    if len(found) > MAX_FAILED:
        yield f"... and {len(found) - MAX_FAILED} more; `dataserver web` lists them"
    if any(one.kind == "image" for one in found):
        yield "`dataserver lint --decode` says more of such images, and writes the list that quarantines them"
