"""`dataserver top`: watches a fleet in the terminal."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Annotated, Final

import tyro
from rich.console import Console
from rich.live import Live

from dataserver.cli.arguments import Addresses, ServerCredentials, Switch, server_names
from dataserver.cli.fleet_tables import fleet_tables
from dataserver.cli.tables import console_for_tables
from dataserver.reporting.fleet_failures import Failed, FailureWatch
from dataserver.reporting.fleet_look import Fleet
from dataserver.reporting.fleet_numbers import Answer
from dataserver.security import NO_CREDENTIALS, Channels

WIDTH_OF_FILE: Final = 1000
"""Most characters of a table that goes to a file: it has all columns and no more width than they need."""
MAX_INTERVAL_S: Final = 3600.0


def top(
    addresses: Addresses,
    interval_s: Annotated[float, tyro.conf.arg(help_behavior_hint="")] = 2.0,
    once: Switch = False,
    credentials: ServerCredentials = NO_CREDENTIALS,
) -> None:
    """Show what a fleet does: throughput, streams, memory and failures of each server, step and lag of each rank,
    samples and shards that failed.

    It redraws the terminal until Ctrl-C. A server that does not answer is shown as such, and asked again.

    Args:
        addresses: HOST:PORT of servers, or HOST:FIRST-LAST for a range of ports, separated by spaces or commas.
        interval_s: Seconds between two updates, over which rates are averaged; 2 by default.
        once: Print one table after one interval, and end.
        credentials: What to show the servers.
    """
    names = server_names(addresses)
    _check(interval_s)
    console = console_for_tables()
    if not once:
        _check_terminal(console)
    with _fleet(names, Channels(credentials)) as fleet:
        failures = FailureWatch(fleet.channels)
        if once:
            fleet.look()
            time.sleep(interval_s)
            answers = fleet.look()
            _print(console, answers, failures.look(answers))
            return
        _watch(fleet, failures, console, interval_s)


def _print(console: Console, answers: Sequence[Answer], failed: Sequence[Failed]) -> None:
    if not console.is_terminal:
        console.width = WIDTH_OF_FILE
    console.print(fleet_tables(answers, console.width, failed=failed))


def _watch(fleet: Fleet, failures: FailureWatch, console: Console, interval_s: float) -> None:
    with (
        suppress(KeyboardInterrupt),  # it is how this ends, so no failure
        _in_order_on_sigterm(),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            answers = fleet.look()
            tables = fleet_tables(answers, console.width, console.height, failures.look(answers))
            live.update(tables, refresh=True)
            time.sleep(interval_s)


def _check(interval_s: float) -> None:
    if not 0.1 <= interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"--interval-s is {interval_s}; 0.1 to {MAX_INTERVAL_S:.0f} seconds are required")


@contextmanager
def _in_order_on_sigterm() -> Iterator[None]:
    """End with the shell's code for SIGTERM, but only after the screen is as it was; a second one ends it at once."""

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_terminal(console: Console) -> None:
    if not console.is_terminal:
        raise ValueError("top redraws a terminal, and the output is none; add --once to print one table")
    if console.is_dumb_terminal:
        raise ValueError("top redraws a terminal, and this one (TERM) has no cursor; add --once to print one table")


@contextmanager
def _fleet(names: Sequence[str], channels: Channels) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet({name: stack.enter_context(channels.open(name)) for name in names})
