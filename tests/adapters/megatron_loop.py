"""The documentation's provider and step in Megatron-LM's own `pretrain`: megatron_loop.py SERVERS JOB OUT."""

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from adapters import cuda_on_cpu
from adapters.examples import example

cuda_on_cpu.pretend()
from adapters.tiny_mimo import TOKENS, WIDTH, mimo  # noqa: E402
from megatron.core.datasets import utils  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.training import get_args, get_timers, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

UPDATES, MICROBATCHES = 7, 10
"""Of `pass_with_parity`, and of a step on all ranks."""
OPTIONS = f"""--num-layers 2 --hidden-size {WIDTH} --num-attention-heads 4 --seq-length {TOKENS} --vocab-size 319
 --max-position-embeddings {TOKENS} --micro-batch-size 1 --global-batch-size {MICROBATCHES} --train-iters {UPDATES}
 --lr 1e-3 --adam-eps 1e-4 --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --clip-grad 0
 --calculate-per-token-loss --transformer-impl local --use-cpu-initialization --distributed-backend gloo
 --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-dropout-fusion
 --no-bias-gelu-fusion --no-rope-fusion --tokenizer-type NullTokenizer --dataloader-type external --eval-iters 0
 --eval-interval 100 --save-interval 1 --log-interval 1 --timing-log-level 2"""
utils.compile_helpers = lambda: None  # of data sets that are not used


def arguments(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--servers")
    parser.add_argument("--job")
    return parser


def main(servers: str, job: str, out: Path) -> None:
    sys.argv = [
        sys.argv[0],
        *OPTIONS.split(),
        "--servers",
        servers,
        "--job",
        job,
        "--save",
        str(out),
        "--load",
        str(out),
    ]
    parsed = parse_and_validate_args(extra_args_provider=arguments)
    names: dict[str, Any] = {}
    exec(example("served.is_distributed"), names)
    models = []

    def model(*_: Any, **__: Any) -> Any:
        models.append(mimo(core_transformer_config_from_args(get_args())))
        models[0].pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return models[0]

    configuration = pretrain_cfg_container_from_args(parsed)
    pretrain(configuration, names["served"], ModelType.encoder_or_decoder, names["forward_step"], model_provider=model)
    assert get_timers()("batch-generator").active_time() > 0, "it tells what ranks wait for data"
    if dist.get_rank() == 0:
        torch.save({name: p.detach() for name, p in models[0].named_parameters()}, out / "parameters.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
