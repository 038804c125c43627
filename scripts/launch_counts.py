"""Counts what a training step would launch on a GPU and where the host would wait for it, without one.

The modules lie on torch's meta device, where nothing is computed: what runs there would be a kernel, and what is asked
of it a wait. Counted are operations, by the microbatch's pass that asks for them; those that only give memory another
shape, or take some, are none. Compiled blocks launch less, since a compiler joins operations. AdamW is left out: on a
GPU it is one kernel for each few hundred tensors.

Norms count as the operations that they consist of, which torch has one kernel for on GPUs.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import patch

import torch
import yaml
from on_gpu.preset import Size, job
from on_gpu.serving import make_shards, servers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, HashStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import trainclient.upload
from dataserver.planning.simulation import Operation
from trainclient.client import Batch
from trainclient.exchange.message_header import MessageHeader
from trainclient.program.runner import ChunkRunner
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import process_groups
from trainclient.training.config import TrainConfig, validate_config
from trainclient.training.jobs import Jobs, prepare
from trainclient.training.loop import Trainer
from trainclient.training.signals import StopSignals
from trainclient.training.sinks import MetricsWriter
from trainclient.training.streams import Streams
from trainclient.training.traceback_frames import is_ours

UPLOADS: Final = Path(trainclient.upload.__file__)
META: Final = torch.device("meta")
NO_KERNEL: Final = re.compile(r"^aten::(empty|new_empty|_unsafe_view|lift|detach|alias|is_|sym_|record)")
"""Operations that launch nothing, beside views."""
REST: Final = "between passes"
"""What no microbatch's pass asks for: sums over the step, norm, update, and what begins a step."""


@dataclass(slots=True)
class Counts:
    """What one pass of a microbatch asked for."""

    launches: Counter[str] = field(default_factory=Counter)
    """Number of kernels by operation."""
    uploads: Counter[str] = field(default_factory=Counter)
    """Copies to the device; those that the host waits for are among the waits, too."""
    waits: Counter[str] = field(default_factory=Counter)
    """What the host waits for, by operation and the line of ours that asks."""

    @property
    def totals(self) -> tuple[int, int, int]:
        """Number of launches, uploads and waits."""
        return self.launches.total(), self.uploads.total(), self.waits.total()


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations on the meta device, by the label that is set."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.label = REST
        self.found: dict[str, Counts] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count, and answer what the meta device cannot."""
        given, name = dict(kwargs or {}), func._schema.name
        counts = self.found.setdefault(self.label, Counts())
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        on_device = any(t.is_meta for t in tensors)
        if on_device and name.startswith("c10d::"):
            counts.launches[name] += 1
            return _message(func, args)
        if on_device and (answer := _waited_for(name, args, given)) is not None:
            counts.waits[f"{name} in {_asked_by()}"] += 1
            return answer[0]
        made = func(*args, **given)
        if func.is_view or NO_KERNEL.match(name):
            return made
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        if any(t.is_meta for t in results) or on_device:
            if name in ("aten::_to_copy", "aten::copy_") and any(not t.is_meta for t in tensors):
                counts.uploads[f"in {_asked_by()}"] += 1
                if not given.get("non_blocking", args[2] if len(args) > 2 else False):
                    counts.waits[f"blocking upload in {_asked_by()}"] += 1
            else:
                counts.launches[name] += 1
        return made


def _waited_for(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> tuple[Any] | None:
    """The answer to what the host cannot know without waiting; None if it need not wait."""
    if name == "aten::_local_scalar_dense":
        return (torch.ones((), dtype=args[0].dtype).item(),)
    if name == "aten::_to_copy" and torch.device(given.get("device") or META).type == "cpu" and args[0].is_meta:
        return (torch.zeros(args[0].shape, dtype=given.get("dtype") or args[0].dtype),)
    if name == "aten::copy_" and not args[0].is_meta and args[1].is_meta:
        return (args[0].zero_(),)
    if name == "aten::nonzero":
        return (torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device=META),)
    if name == "aten::equal":
        return (True,)
    return None


def _message(func: Any, args: Sequence[Any]) -> Any:
    """What a collective of one process gives: what it was given, and a work that is done."""
    returns = [str(r.type) for r in func._schema.returns]
    made = [FakeWork().boxed() if "Work" in kind else args[0] for kind in returns]
    return made[0] if len(made) == 1 else tuple(made)


def _asked_by() -> str:
    """The innermost line of the trainer's own code, but for what all uploads call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if is_ours(str(file)) and file != UPLOADS:
            return f"{file.parent.name}/{file.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "the backward pass"


@contextmanager
def on_meta() -> Iterator[None]:
    """Let a trainer be made of modules without values, whose attention takes the kernel that GPUs take."""
    with ExitStack() as stack:
        stack.enter_context(patch("trainclient.training.models.initialise"))
        stack.enter_context(patch("trainclient.models.attention.flash_applies", _is_meta))
        stack.enter_context(patch("torch.optim.AdamW.step"))
        stack.enter_context(patch("trainclient.exchange.message_header.decode", _all_valid))
        yield


def _is_meta(device: torch.device, *rest: object) -> bool:
    """Whether attention is one kernel."""
    del rest
    return device == META


def _all_valid(encoded: Tensor, expected: MessageHeader) -> Tensor:
    """What a message without values says of its items."""
    del encoded
    return torch.ones(expected.num_valid, dtype=torch.bool)


def label_passes(runner: ChunkRunner, launches: Launches) -> None:
    """Have what a runner does counted for its module and microbatch."""
    module = runner.site.module.name

    def labelled(does: Callable[..., None], what: str) -> Callable[..., None]:
        def run(operation: Operation, *rest: Batch) -> None:
            launches.label = f"{module} {what} {operation.microbatch}"
            does(operation, *rest)
            launches.label = REST

        return run

    for what in ("forward", "backward", "exchange"):
        setattr(runner, what, labelled(getattr(runner, what), what))


def count_step(config: TrainConfig, jobs: Jobs, servers: str) -> dict[str, Counts]:
    """What the first step of a job of one process asks for, by "MODULE PASS MICROBATCH".

    Raises:
        ValueError: the job has several processes.
    """
    topology = Topology.of(jobs.training.spec)
    if topology.world_size != 1:
        raise ValueError(
            f"the job has {topology.world_size} processes; launches are counted in one, so set degrees to 1"
        )
    launches = Launches()
    with on_meta(), process_groups(topology, torch.device("cpu"), 60, HashStore(), 0) as groups:
        trainer = Trainer(config, jobs.training, topology, replace(groups, device=META))
        trainer._optimizer._fused = True  # as it is on a GPU
        for runner in trainer._machine.runners:
            label_passes(runner, launches)
        with Streams.open(servers, jobs.training, groups.process, trainer.tensors) as streams, launches:
            trainer.run(streams, StopSignals(1), MetricsWriter())
    return launches.found


def by_pass(found: Mapping[str, Counts]) -> dict[str, list[Counts]]:
    """Counts of all microbatches of each "MODULE PASS", and of the rest of the step."""
    passes: dict[str, list[Counts]] = defaultdict(list)
    for label, counts in found.items():
        passes[label if label == REST else label.rpartition(" ")[0]].append(counts)
    return dict(passes)


def show(found: Mapping[str, Counts]) -> None:
    """Print the largest counts of each pass, its most frequent operations, and every wait with the line that asks."""
    table = Table("pass", "microbatches", "launches", "uploads", "waits", "most frequent")
    for name, several in by_pass(found).items():
        largest = [max(counts.totals[number] for counts in several) for number in range(3)]
        often = sum((counts.launches for counts in several), Counter[str]()).most_common(6)
        shown = ", ".join(f"{n.removeprefix('aten::')} {count // len(several)}" for n, count in often)
        table.add_row(name, str(len(several)), *map(str, largest), shown)
    console = Console(width=150)
    console.print(table)
    waits = sum((counts.waits for counts in found.values()), Counter[str]())
    for name, count in waits.most_common():
        console.print(f"waits {count} times: {name}", highlight=False)


def main() -> None:
    """Count the first step of a preset on made images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="vit-h", help="preset (default vit-h)")
    parser.add_argument("--backbone", default="llama3-7b", help="preset (default llama3-7b)")
    parser.add_argument("--layers", type=int, default=16, help="of the backbone (default 16)")
    parser.add_argument("--sequences", type=int, default=4, help="of a step (default 4)")
    given = parser.parse_args()
    size = Size(given.backbone, given.layers, given.encoder, sequences=given.sequences)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        described = folder / "job.yaml"
        described.write_text(yaml.safe_dump(job(size, 1, 1)))
        with servers(folder, make_shards(folder, 400), 1) as address:
            models = {
                "encoder": {"preset": given.encoder},
                "backbone": {"preset": given.backbone, "layers": given.layers},
            }
            config = validate_config({"job": described, "servers": address, "dtype": "bfloat16", "steps": 1} | models)
            show(count_step(config, prepare(config)[0], address))


if __name__ == "__main__":
    main()
