"""`dataserver doctor`."""

from collections.abc import Sequence
from contextlib import ExitStack
from time import time
from typing import Annotated, Final

import grpc
import tyro
from disttrain.v1.admin_service_pb2 import GetDiagnosticsRequest, GetMetricsRequest
from disttrain.v1.admin_service_pb2_grpc import AdminServiceStub
from disttrain.v1.data_service_pb2 import GetDatasetInfoRequest, GetServerInfoRequest
from disttrain.v1.data_service_pb2_grpc import DataServiceStub

from dataserver.addresses import expanded, split_address
from dataserver.cli.arguments import ServerCredentials, Switch
from dataserver.cli.fleet_checks import Finding, Seen, check, summary
from dataserver.security import NO_CREDENTIALS, Channels, tls_problem, with_hint

ANSWER_S: Final = 10.0
"""Time that a server has for each answer, its connection included."""
MAX_SERVERS: Final = 256
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

    Compares releases, builds, content digests, datasets, tokenizers and clocks, and looks at certificates, limits of
    files, memory, disks and peers. Prints a finding each with its remedy; the exit status is 1 where there is any.
    Needs the right `metrics` of servers with a policy.

    Args:
        addresses: HOST:PORT of servers, or HOST:FIRST-LAST for a range of ports, separated by spaces or commas.
        insecure: Do not mention that others may reach servers without encryption or credentials.
        credentials: What to show the servers.
    """
    names = tuple(dict.fromkeys(expanded([name for address in addresses for name in address.split(",") if name])))
    if not 1 <= len(names) <= MAX_SERVERS:
        raise ValueError(f"{len(names)} servers are named; 1 to {MAX_SERVERS} are required")
    for name in names:
        split_address(name, "a server")
    fleet, silent = look(names, Channels(credentials))
    findings = [Finding((name,), why, remedy) for name, (why, remedy) in silent.items()]
    findings += check(fleet, time(), insecure=insecure)
    print(summary(fleet, {name: why for name, (why, _) in silent.items()}))
    for finding in findings:
        print(finding)
    print("nothing is wrong" if not findings else f"{len(findings)} findings")
    return FOUND if findings else 0


def look(names: Sequence[str], channels: Channels) -> tuple[list[Seen], dict[str, tuple[str, str]]]:
    """What each server says of itself; and of those that do not, why, and what to do about it."""
    fleet: list[Seen] = []
    silent: dict[str, tuple[str, str]] = {}
    with ExitStack() as stack:
        opened = {name: stack.enter_context(channels.open(name)) for name in names}
        # The first answers of all at once: those that do not answer would add up.
        first = {
            name: DataServiceStub(channel).GetServerInfo.future(GetServerInfoRequest(), timeout=ANSWER_S)
            for name, channel in opened.items()
        }
        for name, channel in opened.items():
            try:
                info = first[name].result()
                data, admin = DataServiceStub(channel), AdminServiceStub(channel)
                datasets = data.GetDatasetInfo(GetDatasetInfoRequest(), timeout=ANSWER_S)
                metrics = admin.GetMetrics(GetMetricsRequest(), timeout=ANSWER_S)
                before = time()
                diagnostics = admin.GetDiagnostics(GetDiagnosticsRequest(), timeout=ANSWER_S)
                after = time()
            except grpc.RpcError as error:
                silent[name] = _why(error)
                continue
            clock_s = diagnostics.time.ToNanoseconds() / 1e9 - (before + after) / 2
            fleet.append(Seen(name, info, datasets, metrics, diagnostics, clock_s, (after - before) / 2))
    return fleet, silent


def _why(error: grpc.RpcError) -> tuple[str, str]:
    code, details = error.code(), error.details() or ""
    if (problem := tls_problem(details)) is not None:
        found, _, remedy = problem.partition(": ")
        return found, remedy
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return "another program, or an older release", "finish the rolling upgrade, or correct the address"
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        found, _, remedy = details.partition(": ")
        return f"refuses: {found}", remedy
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {ANSWER_S:g} s", "see whether it is overloaded: its log, and dataserver top"
    return f"does not answer: {with_hint(details)}", "start it, or correct the address"
