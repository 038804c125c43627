"""Train a job under Ray Train, on a Ray cluster whose data servers `dataserver ray` started.

    python deploy/ray/train.py --workers 40 --gpus -- --job job.yaml --checkpoint.directory /ckpt

Ray Train places the workers, starts all of them again after a failure, and so resumes from the newest checkpoint. Each
worker runs one rank of `trainclient train`, whose options stand behind `--`. It reaches servers on 50051 and up,
and for data connections on 51051 and up. Needs `pip install 'ray[train]'`.
"""

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

import ray
import ray.train
import torch.distributed
from ray.train.torch import TorchConfig, TorchTrainer

from dataserver.fleet.on_ray import NAMESPACE, addresses


def agreed_port() -> int:
    """A port for the trainers' own process group, which is free on the first rank's node; another one in each attempt.

    A fixed one may be another program's, and would then be so in each attempt. Ray's own group, which stands beside it,
    carries the number to all ranks.
    """
    found: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        with socket.create_server(("", 0)) as probe:
            found = [probe.getsockname()[1]]
    torch.distributed.broadcast_object_list(found, src=0)
    return int(found[0])


def run_rank(settings: dict[str, Any]) -> None:
    """Run one rank to its end; an error starts all of them again."""
    context = ray.train.get_context()
    variables = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "MASTER_ADDR": os.environ["MASTER_ADDR"],
        "MASTER_PORT": agreed_port(),
    }
    command = [sys.executable, "-m", "trainclient", "train", "--servers", addresses(), *settings["options"]]
    subprocess.run(command, env=os.environ | {name: str(value) for name, value in variables.items()}, check=True)


def main() -> None:
    """Train to the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="ranks of the job")
    parser.add_argument("--gpus", action="store_true", help="give each worker a GPU")
    parser.add_argument("--failures", type=int, default=20, help="how often the job is started again")
    parser.add_argument("options", nargs="+", help="of `trainclient train`, after --")
    given = parser.parse_args()
    ray.init("auto", namespace=NAMESPACE)
    try:
        addresses()
    except ValueError as error:  # once, and not in each attempt of each worker
        sys.exit(f"train.py: {error}")
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"options": given.options},
        torch_config=TorchConfig(backend="gloo"),  # Ray's own; the trainers choose theirs
        scaling_config=ray.train.ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=given.failures)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
