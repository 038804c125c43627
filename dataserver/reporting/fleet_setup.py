"""What the servers of a fleet are set up like: asked once."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

import grpc
from disttrain.v1.admin_service_pb2 import (
    GetDiagnosticsRequest,
    GetMetricsRequest,
    ListFailuresRequest,
    ListFailuresResponse,
)
from disttrain.v1.data_service_pb2 import GetDatasetInfoRequest, GetServerInfoRequest
from google.protobuf.message import DecodeError, Message

from dataserver.dataset import printable
from dataserver.reporting.fleet_calls import (
    GET_DATASET_INFO,
    GET_DIAGNOSTICS,
    GET_METRICS,
    GET_SERVER_INFO,
    LIST_FAILURES,
    M,
    Method,
    Servers,
    ask_all,
)
from dataserver.reporting.fleet_checks import Seen
from dataserver.security import tls_problem, with_hint

ANSWER_S: Final = 10.0
"""Time that a server has for each answer, its connection included."""
ANOTHER_PROGRAM: Final = ("another program, or an older release", "finish the rolling upgrade, or correct the address")


def look(servers: Servers) -> tuple[list[Seen], dict[str, tuple[str, str]]]:
    """What each server says of itself; and of those that do not, why, and what to do about it."""
    fleet: list[Seen] = []
    silent: dict[str, tuple[str, str]] = {}
    names = tuple(servers.names)
    with ExitStack() as stack:
        opened = {name: stack.enter_context(servers.open(name)) for name in names}
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


def failures(servers: Servers) -> dict[str, ListFailuresResponse]:
    """What each server remembers of failed samples and shards; nothing of those that do not say."""
    with ExitStack() as stack:
        opened = {name: stack.enter_context(servers.open(name)) for name in servers.names}
        replies = ask_all(opened, LIST_FAILURES, ListFailuresRequest(), ANSWER_S)
        return {reply.address: reply.message for reply in replies if reply.message is not None}


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
