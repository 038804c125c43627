"""`dataserver doctor`."""

from time import time
from typing import Annotated, Final

import tyro

from dataserver.cli.arguments import ServerCredentials, Switch, server_names
from dataserver.reporting.fleet_calls import NamedServers
from dataserver.reporting.fleet_checks import Finding, check, summary
from dataserver.reporting.fleet_setup import look
from dataserver.security import NO_CREDENTIALS, Channels

FOUND: Final = 1
"""Exit status where something is wrong."""


def doctor(
    addresses: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ADDRESS...", help_behavior_hint="(required)")
    ],
    insecure: Switch = False,
    credentials: ServerCredentials = NO_CREDENTIALS,
) -> int:
    """Check a fleet, and say what to change.

    Compares releases, builds, content digests, datasets, tokenizers, transforms and clocks, and looks at certificates,
    limits of files, memory, disks and peers. Prints a finding each with its remedy; the exit status is 1 where there is
    any. Needs the right `metrics` of servers with a policy.

    Args:
        addresses: HOST:PORT of servers, or HOST:FIRST-LAST for a range of ports, separated by spaces or commas.
        insecure: Do not mention that others may reach servers without encryption or credentials.
        credentials: What to show the servers.
    """
    fleet, silent = look(NamedServers(server_names(addresses), Channels(credentials)))
    findings = [Finding((name,), why, remedy) for name, (why, remedy) in silent.items()]
    findings += check(fleet, time(), insecure=insecure)
    print(summary(fleet, {name: why for name, (why, _) in silent.items()}))
    for finding in findings:
        print(finding)
    print("nothing is wrong" if not findings else f"{len(findings)} findings")
    return FOUND if findings else 0
