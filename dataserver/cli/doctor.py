"""`dataserver doctor`."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from time import time
from typing import Annotated, Final

import grpc
import tyro
from disttrain.v1.admin_service_pb2 import GetDiagnosticsRequest, GetMetricsRequest
from disttrain.v1.data_service_pb2 import GetDatasetInfoRequest, GetServerInfoRequest
from google.protobuf.message import DecodeError, Message

from dataserver.cli.arguments import ServerCredentials, Switch, server_names
from dataserver.cli.fleet_calls import (
    GET_DATASET_INFO,
    GET_DIAGNOSTICS,
    GET_METRICS,
    GET_SERVER_INFO,
    M,
    Method,
    ask_all,
)
from dataserver.cli.fleet_checks import Finding, Seen, check, summary
from dataserver.dataset import printable
from dataserver.security import NO_CREDENTIALS, Channels, tls_problem, with_hint

ANSWER_S: Final = 10.0
"""Time that a server has for each answer, its connection included."""
ANOTHER_PROGRAM: Final = ("another program, or an older release", "finish the rolling upgrade, or correct the address")
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
    fleet, silent = look(server_names(addresses), Channels(credentials))
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
        infos = _answers(opened, GET_SERVER_INFO, GetServerInfoRequest(), silent)
        datasets = _answers(opened, GET_DATASET_INFO, GetDatasetInfoRequest(), silent)
        metrics = _answers(opened, GET_METRICS, GetMetricsRequest(), silent)
        diagnostics = _answers(opened, GET_DIAGNOSTICS, GetDiagnosticsRequest(), silent)
    for name, (said, sent_at, got_at) in diagnostics.items():
        try:
            clock_s = said.time.ToNanoseconds() / 1e9 - (sent_at + got_at) / 2
        except ValueError as error:
            silent[name] = f"says what cannot be: {printable(str(error), 200)}", "see what listens there"
            continue
        doubt_s = (got_at - sent_at) / 2
        fleet.append(Seen(name, infos[name][0], datasets[name][0], metrics[name][0], said, clock_s, doubt_s))
    return fleet, {name: silent[name] for name in names if name in silent}


def _answers(
    opened: Mapping[str, grpc.Channel], method: Method[M], request: Message, silent: dict[str, tuple[str, str]]
) -> dict[str, tuple[M, float, float]]:
    """The answers of all that are not silent yet, each with the times of its request and of itself; the others are
    added to `silent`."""
    found = {}
    asked = {name: channel for name, channel in opened.items() if name not in silent}
    for reply in ask_all(asked, method, request, ANSWER_S):
        if reply.error is not None:
            silent[reply.address] = _why(reply.error)
        elif reply.message is not None:
            found[reply.address] = reply.message, reply.sent_at, reply.got_at
    return found


def _why(error: grpc.RpcError | DecodeError) -> tuple[str, str]:
    if isinstance(error, DecodeError):
        return ANOTHER_PROGRAM
    code, details = error.code(), error.details() or ""
    if (problem := tls_problem(details)) is not None:
        found, _, remedy = problem.partition(": ")
        return found, remedy
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ANOTHER_PROGRAM
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        found, _, remedy = details.partition(": ")
        return f"refuses: {found}", remedy
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {ANSWER_S:g} s", "see whether it is overloaded: its log, and dataserver top"
    return f"does not answer: {with_hint(details)}", "start it, or correct the address"
