"""The command line of the demo, by Python's own library alone: `scripts/demo` reads it before anything is installed."""

import argparse
from pathlib import Path

from demo_parts.job import LAYOUTS, MODALITIES

ABOUT = """Trains a small multimodal model on this machine: two data servers, some trainer processes, one short report.

Makes demo shards from photographs that scikit-image carries, unless --dataset names an img2dataset folder, and shards
of audio and videos, if --modalities names them. At the end it times some steps twice, in canonical order and as
planned, in processes that sleep as long as the planner expects each pass to take.
"""


def parse() -> argparse.Namespace:
    """Read the command line of the demo; what is wrong with it, and help, end the process."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default 20)")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="how modules share processes (default pipelined; colocated if there are several modalities)",
    )
    parser.add_argument(
        "--modalities",
        choices=MODALITIES,
        default=MODALITIES[0],
        metavar="NAMES",
        help=f"what samples have: {'; '.join(MODALITIES)}. Each gets an encoder. With several the demo also shows what "
        f"balancing gains as encoders are added (default {MODALITIES[0]})",
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


if __name__ == "__main__":
    parse()
