"""Trains a small multimodal model on this machine: two data servers, six trainer processes, one short report.

Makes demo shards from photographs that scikit-image carries, unless --dataset names an img2dataset folder.
"""

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import yaml
from demo_processes import CommandFailedError, Processes
from demo_report import collect, print_table
from make_demo_shards import make_shards

from dataserver.cli.pictures import draw_plan
from dataserver.dataset import Dataset
from dataserver.jobs import JobPlanner
from dataserver.planning.identity import parse_job
from dataserver.planning.planner import explain
from dataserver.preprocessing.tokens import ByteTokenizer, tokenizer_spec

BIN = Path(sys.executable).parent
NUM_SERVERS = 2
PICTURED_STEP = 0

# Measured with the tiny models on one core of a CPU; the planner needs the ratios only.
COSTS = {
    "encoder": {"microbatch_ns": 350_000, "linear_ps": 6_600_000, "quadratic_fs": 6_300_000, "backward_percent": 160},
    "backbone": {
        "microbatch_ns": 600_000,
        "linear_ps": 10_000_000,
        "quadratic_fs": 10_000_000,
        "backward_percent": 180,
    },
    "generator": {
        "microbatch_ns": 700_000,
        "linear_ps": 10_000_000,
        "quadratic_fs": 8_300_000,
        "backward_percent": 150,
    },
}


def job_spec(fingerprint: str, steps: int) -> dict[str, Any]:
    """The demo's job: image-text pairs, most of them understood, 40 % generated."""
    return {
        "stream": {
            "datasets": [{"name": "demo", "fingerprint": fingerprint}],
            "tokenizer": tokenizer_spec(ByteTokenizer()).model_dump(mode="json"),
            "sizing": {"patch": 14, "merge": 2, "max_patches": 144},
            "seq_len": 512,
            "packing": {"enabled": False},
            "global_batch": 32,
            "generation": {"ratio": "0.4", "query_tokens": 16},
            "shuffle_window": 4,
        },
        "execution": {
            "modules": [
                {"name": "encoder", "kind": "encoder", "cost": COSTS["encoder"]},
                {"name": "backbone", "kind": "backbone", "dp": 2, "pp": 2, "cost": COSTS["backbone"]},
                {"name": "generator", "kind": "generator", "cost": COSTS["generator"]},
            ],
            "microbatch": 1,
            "end": {"steps": steps},
        },
    }


def demo_shards(output: Path) -> Path:
    """The demo's own shards, made unless an earlier run has finished making them."""
    folder, unfinished = output / "shards", output / "shards.unfinished"
    if not folder.is_dir():
        print("Making about 600 demo samples ...", flush=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        make_shards(unfinished).rename(folder)
    return folder


def run(arguments: argparse.Namespace, processes: Processes) -> None:
    """The demo, from shards to report."""
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    if arguments.report:  # before training, lest a wrong path waste it
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
    dataset_path = arguments.dataset
    if dataset_path is None:
        dataset_path = demo_shards(output)
    index_dir = output / "index" / dataset_path.resolve().name
    command = [BIN / "dataserver", "index", dataset_path, "--index-dir", index_dir, "--tokenizer", "bytes"]
    processes.run("index", command)
    dataset = Dataset.open(dataset_path, index_dir)
    job_file, metrics_file = output / "job.yaml", output / "metrics.jsonl"
    spec = job_spec(dataset.fingerprint, arguments.steps)
    job_file.write_text(yaml.safe_dump(spec, sort_keys=False))
    metrics_file.unlink(missing_ok=True)

    print(f"Starting {NUM_SERVERS} data servers ...", flush=True)
    serve = [BIN / "dataserver", "serve", "--dataset", f"demo={dataset_path}", "--index-dir", f"demo={index_dir}"]
    addresses = [
        processes.serve([*serve, "--listen", "127.0.0.1:0"], output / f"server-{i}.log") for i in range(NUM_SERVERS)
    ]
    print(f"Training for {arguments.steps} steps: encoder 1, backbone 2 x 2 stages, generator 1 process", flush=True)
    train = [BIN / "trainclient", "train", "--job", job_file, "--servers", ",".join(addresses)]
    processes.run("training", [*train, "--metrics", metrics_file, "--optimizer.lr", "0.001"])

    job = parse_job(spec)
    planner = JobPlanner(job, [dataset])
    summaries = [explain(job, planner.plan(step)) for step in range(arguments.steps)]
    picture = output / "plan.png"
    draw_plan(job.spec.execution, summaries[PICTURED_STEP], f"step {PICTURED_STEP} of the demo, as simulated", picture)
    figures = collect(metrics_file, summaries)
    print_table(figures)
    for decision in summaries[PICTURED_STEP].plan.decisions:
        if decision.subject == "step":
            print(f"Chosen for step {PICTURED_STEP}: {decision.chosen} ({decision.reason})")
    print(f"One step's pipeline before and after: {picture}")
    if arguments.report:
        arguments.report.write_text(json.dumps(figures, indent=2) + "\n")
        print(f"All figures: {arguments.report}")


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train (default 20)")
    parser.add_argument("--dataset", type=Path, help="img2dataset folder to train on instead of made shards")
    parser.add_argument("--report", type=Path, help="write all figures to this file, as JSON")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder for shards, index, logs and the picture"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; at least 1 is required")
    return arguments


def main() -> int:
    """Run the demo; whatever happens, no process of it survives."""
    arguments = parse()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    with Processes() as processes:
        try:
            run(arguments, processes)
        except KeyboardInterrupt:
            print("\ninterrupted; stopping all processes", file=sys.stderr)
            return 130
        except CommandFailedError as error:
            return error.code
        except (ValueError, OSError, RuntimeError) as error:
            print(f"scripts/demo: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
