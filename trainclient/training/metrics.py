"""What a step did, over all processes."""

import hashlib
import json
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from rich.console import Console

from trainclient.parallel.groups import Groups

_MASK_63 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one process adds to the totals of a step."""

    text_loss_sum: float
    image_loss_sum: float
    gradient_square_sum: float
    """Of this process's module, or 0 where another data-parallel rank counts it."""
    samples: int
    """Samples of this process's views, or 0 where another stage or module counts them."""
    sample_digest: int
    """Sum of `sample_hash` over these samples."""
    images: int
    invalid_images: int
    stop: bool
    """Whether this process was asked to stop."""
    wait_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Totals:
    """The same over all processes."""

    text_loss_sum: float
    image_loss_sum: float
    gradient_square_sum: float
    samples: int
    sample_digest: int
    images: int
    invalid_images: int
    stop: bool
    wait_ratio: float
    """Largest share of the step in which any process waited for data."""
    seconds: float
    """Of the slowest process."""


def reduce_contribution(own: Contribution, groups: Groups) -> Totals:
    """Add up what all processes have; all of them get the same totals, to the bit."""
    device = groups.device
    sums = torch.tensor(
        [own.text_loss_sum, own.image_loss_sum, own.gradient_square_sum], dtype=torch.float64, device=device
    )
    counts = torch.tensor(
        [own.samples, own.sample_digest, own.images, own.invalid_images, int(own.stop)],
        dtype=torch.int64,
        device=device,
    )
    largest = torch.tensor([own.wait_s / max(own.seconds, 1e-9), own.seconds], dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=groups.world)
    dist.all_reduce(counts, group=groups.world)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.world)
    text, image, squares = sums.tolist()
    samples, digest, images, invalid, stop = counts.tolist()
    wait_ratio, seconds = largest.tolist()
    return Totals(text, image, squares, samples, digest & _MASK_63, images, invalid, stop > 0, wait_ratio, seconds)


def sample_hash(samples: Iterable[tuple[int, int, int]]) -> int:
    """Sum of 63-bit hashes of (dataset, pass, sample): the same for the same set of samples, in any order or split."""
    total = 0
    for sample in samples:
        digest = hashlib.blake2b(struct.pack("<QQQ", *sample), digest_size=8).digest()
        total += int.from_bytes(digest, "little")
    return total & _MASK_63


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of the metrics file."""

    step: int
    text_loss: float | None
    """Mean cross entropy of the step's target tokens; None where it has none."""
    image_loss: float | None
    """Mean squared error of the step's target patches; None where it has none."""
    grad_norm: float
    """Over all modules, before clipping."""
    samples: int
    sample_digest: str
    """Names the set of samples: two runs of one stream have the same one at the same step."""
    images: int
    invalid_images: int
    seconds: float
    """Wall time of the step, of the slowest process."""
    data_wait_percent: float
    """Largest share of the step in which any process waited for data."""


class MetricsWriter:
    """Appends a JSON line for every step, and shows one."""

    def __init__(self, path: Path | None, console: Console | None, num_steps: int) -> None:
        """Write to a file, a console, both, or neither."""
        self._console = console
        self._num_steps = num_steps
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="ascii")

    def write(self, metrics: StepMetrics) -> None:
        """Write one step."""
        if self._file is not None:
            self._file.write(json.dumps(asdict(metrics)) + "\n")
            self._file.flush()
        if self._console is not None:
            self._console.print(_line(metrics, self._num_steps), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _line(m: StepMetrics, num_steps: int) -> str:
    losses = "  ".join(
        f"{name} loss {loss:.4f}" for name, loss in (("text", m.text_loss), ("image", m.image_loss)) if loss is not None
    )
    return (
        f"step {m.step + 1}/{num_steps}  {losses}  grad norm {m.grad_norm:.3g}  "
        f"{m.samples / max(m.seconds, 1e-9):.1f} samples/s  {m.seconds:.2f} s  data wait {m.data_wait_percent:.1f} %"
    )
