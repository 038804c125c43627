"""Runs the demo, from shards to report; `demo_parts/options.py` says what it does."""

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType

from demo_parts.options import parse
from demo_parts.processes import FailedError, Processes
from demo_parts.progress import display
from demo_parts.report import collect, print_report
from demo_parts.stages import BIN, STAGES, Demo

from dataserver.outputs import require_writable, write_output

INTERRUPTED = 130
ADVICE = "Put right what it says and run the same command again: it goes on with what is there."


class InterruptedDemoError(Exception):
    """The demo was interrupted by Ctrl-C or SIGTERM."""


class Signals:
    """Notes Ctrl-C and SIGTERM. The demo looks where nothing is half done: nothing that it does itself takes long."""

    def __init__(self) -> None:
        """Take both signals; a shell starts background jobs with SIGINT ignored."""
        self.noted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.noted = True


def run(arguments: argparse.Namespace, signals: Signals) -> None:
    """The demo, from shards to report."""
    output, report = relative(arguments.output), arguments.report
    logs = output / "logs"
    for folder in (logs, report.parent if report else logs):  # before training, lest a wrong path waste it
        folder.mkdir(parents=True, exist_ok=True)
    require_writable("--report", report)
    with display(STAGES) as shown:

        def check() -> None:
            if signals.noted:
                shown.say("interrupted, ending all processes")
                raise InterruptedDemoError

        with Processes(logs, shown.tick, check) as processes:
            demo = Demo(
                output,
                arguments.dataset and relative(arguments.dataset),
                arguments.steps,
                arguments.layout,
                arguments.modalities.split(","),
                processes,
                shown,
            )
            demo.make_shards()
            demo.index()
            plans = demo.plan()
            addresses = demo.serve()
            demo.train(addresses)
            measured = demo.timed_steps(addresses, plans)
            shown.begin("ending", "ending the servers")
        shown.done("all processes have ended")
    figures = collect(demo.metrics, plans, measured)
    print_report(figures)
    print(f"Chosen for step 0: {plans['chosen']}")
    print(f"One step's pipeline before and after: {demo.picture}")
    if report:
        write_output("--report", report, json.dumps(figures, indent=2) + "\n")
        print(f"All figures: {report}")
    print("\nTry next:")
    for about, command in next_commands(demo):
        print(f"\n# {about}\n{shlex.join(command)}")


def next_commands(demo: Demo) -> tuple[tuple[str, list[str]], ...]:
    """What it is for, and the command, three times."""
    dataserver, job = str(relative(BIN / "dataserver")), ["--job", str(demo.job), *demo.located]
    page = str(demo.output / "step-0.html")
    return (
        ("Where each sample of a step goes, as a page", [dataserver, "plan", *job, "--step", "0", "--plot", page]),
        ("Which policies suit these samples and costs", [dataserver, "simulate", *job, "--steps", "3"]),
        (
            "The same microbatches for a trainer of your own: DataClient in README.md",
            [dataserver, "serve", *demo.located, "--listen", "127.0.0.1:0"],
        ),
    )


def relative(path: Path) -> Path:
    """A path as short as can be typed here."""
    whole = Path(os.path.abspath(path))  # noqa: PTH100  resolve would follow the links that people name
    return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


def main() -> int:
    """Run the demo; whatever happens, no process of it survives."""
    signals = Signals()
    try:
        run(parse(), signals)
    except InterruptedDemoError:
        print("scripts/demo: interrupted; all its processes have ended", file=sys.stderr)
        return INTERRUPTED
    except FailedError as error:
        print(f"scripts/demo: {error}\n{ADVICE}", file=sys.stderr)
        return error.code
    except (ValueError, OSError) as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
