"""Trains a small multimodal model on this machine: two data servers, some trainer processes, one short report.

Makes demo shards from photographs that scikit-image carries, unless --dataset names an img2dataset folder, and
shards of audio and videos, where --modalities names them. Ends with some steps timed twice, in canonical order and as
planned, in processes that sleep what the planner expects of them.
"""

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType

from demo_parts.job import LAYOUTS, MODALITIES
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


def parse() -> argparse.Namespace:
    """Read the command line of the demo."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default 20)")
    parser.add_argument(
        "--layout", choices=LAYOUTS, help="how modules share processes (default pipelined; colocated with --modalities)"
    )
    parser.add_argument(
        "--modalities",
        choices=MODALITIES,
        default=MODALITIES[0],
        help="what is read, by an encoder for each; several compare what balance gains with each more (default image)",
    )
    parser.add_argument("--dataset", type=Path, help="img2dataset folder to train on instead of made shards")
    parser.add_argument("--report", type=Path, help="write all figures to this file, as JSON")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for shards, index, logs and the picture"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; at least 1 is required")
    several = "," in arguments.modalities
    arguments.layout = arguments.layout or ("colocated" if several else "pipelined")
    if several and arguments.layout not in ("colocated", "pipelined"):
        parser.error(f"--layout is {arguments.layout}; several modalities need colocated or pipelined")
    if several and arguments.dataset:
        parser.error("--dataset names images; leave it out with several modalities, whose shards are made")
    return arguments


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
