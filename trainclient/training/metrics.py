"""What a step did, over all processes."""

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from dataserver.planning.job.fields import Modality
from dataserver.planning.job.identity import Job
from trainclient.modules import Site, Target
from trainclient.program.assembly import Machine
from trainclient.program.interpreter import StepRecord
from trainclient.topology.process_grid import GridProcess
from trainclient.topology.process_groups import Groups
from trainclient.training.device_sums import DeviceSums

_MASK_63 = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one process adds to the totals of a step."""

    sums: Tensor
    """Float64 [4] on the device: text, image and contrastive loss, and the squares of the gradients of the parameters
    of this process that no other one counts."""
    flops: float
    """Operations that this process's views asked of its module, or 0 where another stage counts them; nan: unknown."""
    tokens: int
    """Number of tokens in these views."""
    samples: int
    """Samples of this process's views, or 0 where another stage or module counts them."""
    sample_digest: int
    """Sum of `sample_hash` over these samples."""
    images: int
    invalid_images: int
    stop: bool
    """Whether this process was asked to stop."""
    save_failed: bool
    """Whether this process knows that the checkpoint under way cannot be written."""
    wait_s: float
    seconds: float

    @classmethod
    def of(
        cls,
        machine: Machine,
        process: GridProcess,
        record: StepRecord,
        *,
        squares: Tensor | None = None,
        seconds: float = 0.0,
        stop: bool = False,
        save_failed: bool = False,
    ) -> Self:
        """What a process adds to a step that it ran; each field is said by those processes that it is of."""
        counts = process.tp == 0  # other tensor-parallel ranks have seen and computed the same
        entering = [chunk.module for chunk in process.chunks if counts and chunk.is_first]
        works = [runner.work for runner in machine.runners if counts and runner.site.chunk == 0]
        counting = {runner.site.module.name for runner in machine.runners if _counts_samples(runner.site)}
        samples = [sample for m in entering if m.name in counting for sample in record.seen[m.name].samples]
        images = [record.seen[m.name] for m in entering if m.handles_images or m.modality is Modality.IMAGE]
        losses = [machine.loss_sum(target) for target in (Target.TEXT, Target.IMAGE, Target.PAIRS)]
        none = torch.zeros_like(losses[0])
        return cls(
            sums=torch.stack([*(losses if counts else [none] * len(losses)), none if squares is None else squares]),
            flops=math.nan if any(work.flops is None for work in works) else sum(work.flops or 0 for work in works),
            tokens=sum(work.tokens for work in works),
            samples=len(samples),
            sample_digest=sample_hash(samples),
            images=sum(seen.num_items for seen in images),
            invalid_images=sum(seen.num_invalid for seen in images),
            stop=stop,
            save_failed=save_failed,
            wait_s=record.data_wait_s,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """The same over all processes."""

    sums: DeviceSums
    flops: float
    tokens: int
    samples: int
    sample_digest: int
    images: int
    invalid_images: int
    stop: bool
    save_failed: bool
    wait_ratio: float
    """Largest share of the step in which any process waited for data."""
    seconds: float
    """Seconds of the slowest process."""

    @property
    def loss_sums(self) -> Sequence[float]:
        """Sums of text, image and contrastive loss; waits for the device."""
        return self.sums.values[:3]

    @property
    def norm(self) -> Tensor:
        """Norm of the gradients before clipping: float64 scalar on the device."""
        return self.sums.on_device[3].sqrt()

    @property
    def finite(self) -> Tensor:
        """Whether losses and gradients are: bool scalar on the device."""
        return self.sums.on_device.isfinite().all()


def reduce_contribution(own: Contribution, groups: Groups) -> Totals:
    """Add up what all processes have; all of them get the same totals, to the bit.

    What devices have is added up between them, the rest between the hosts, which wait for no device.
    """
    sums = DeviceSums(own.sums, groups.world)
    flops = torch.tensor(own.flops, dtype=torch.float64)
    flags = [int(own.stop), int(own.save_failed)]
    counts = torch.tensor([own.tokens, own.samples, own.sample_digest, own.images, own.invalid_images, *flags])
    largest = torch.tensor([own.wait_s / max(own.seconds, 1e-9), own.seconds], dtype=torch.float64)
    dist.all_reduce(flops, group=groups.control)
    dist.all_reduce(counts, group=groups.control)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=groups.control)
    tokens, samples, digest, images, invalid, stop, save_failed = counts.tolist()
    wait_ratio, seconds = largest.tolist()
    return Totals(
        sums=sums,
        flops=float(flops),
        tokens=tokens,
        samples=samples,
        sample_digest=digest,
        images=images,
        invalid_images=invalid,
        stop=stop > 0,
        save_failed=save_failed > 0,
        wait_ratio=wait_ratio,
        seconds=seconds,
    )


def _counts_samples(site: Site) -> bool:
    """Whether a module is the one of its job whose samples are counted: all towers have the same."""
    towers = [m for m in site.job.execution.modules if m.modality is not None]
    return site.module == towers[0] if towers else site.module.holds_samples


def sample_hash(samples: Iterable[tuple[int, ...]]) -> int:
    """Sum of 63-bit hashes of (dataset, pass, sample), with the part behind them where documents are split: the same
    for the same set of samples, in any order or split."""
    total = 0
    for sample in samples:
        digest = hashlib.blake2b(struct.pack(f"<{len(sample)}Q", *sample), digest_size=8).digest()
        total += int.from_bytes(digest, "little")
    return total & _MASK_63


@dataclass(frozen=True, slots=True)
class EvaluationMetrics:
    """What the modules make of held-out steps."""

    text_loss: float | None
    """Mean cross entropy of all their target tokens; None where they have none, or it is not finite."""
    image_loss: float | None
    """Mean squared error of all their target patches; None where they have none, or it is not finite."""
    samples: int
    sample_digest: str
    """Names the set of samples, as that of a step."""
    images: int
    invalid_images: int
    seconds: float
    """Wall time, which is no part of any step's."""
    contrastive_loss: float | None = None
    """Mean over their pairs, of all pairs of towers; None where there are no towers, or it is not finite."""
    recall: dict[str, float] | None = None
    """Recall by `TOWER_to_TOWER_rK`: the share of samples whose own one in the other tower is among the K nearest of
    all that were evaluated; None where there are no towers, or no pair that could be decoded."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of the metrics file."""

    step: int
    text_loss: float | None
    """Mean cross entropy of the step's target tokens; None where it has none, or is not finite."""
    image_loss: float | None
    """Mean squared error of the step's target patches; None where it has none, or is not finite."""
    grad_norm: float | None
    """Norm over all modules, before clipping; None where it is not finite."""
    samples: int
    sample_digest: str
    """Names the set of samples: two runs of one stream have the same one at the same step."""
    images: int
    invalid_images: int
    seconds: float
    """Wall time of the step, of the slowest process."""
    data_wait_percent: float
    """Largest share of the step in which any process waited for data."""
    lr: dict[str, float]
    """Learning rate of each module."""
    tokens: int = 0
    """Number of tokens in the backbone's sequences, images included."""
    tokens_per_second: float = 0.0
    images_per_second: float = 0.0
    flops: float | None = None
    """Floating-point operations of the models, forward and backward, without what is computed again; None if a module
    does not count its own."""
    mfu_percent: float | None = None
    """Model FLOPs utilisation: these over what all devices can do in the step's time; None if that is not known."""
    contrastive_loss: float | None = None
    """Mean over the step's pairs, of all pairs of towers; None where there are no towers, or it is not finite."""
    skipped: bool = False
    """Whether the update was left out, because losses or gradients were not finite."""
    evaluation: EvaluationMetrics | None = None
    """Evaluation on the held-out stream after the update; None after most steps."""

    @classmethod
    def of(
        cls,
        record: StepRecord,
        totals: Totals,
        norm: float,
        lr: dict[str, float],
        peak: float | None,
        *,
        pairs: int,
        skipped: bool,
        evaluation: EvaluationMetrics | None = None,
    ) -> "StepMetrics":
        """What all processes together did, with the denominators that any of them saw.

        Args:
            record: of any process.
            totals: of all.
            norm: of the gradients.
            lr: learning rate of each module.
            peak: operations per second of all devices together, if known.
            pairs: the denominator of the contrastive loss, 0 where there are no towers.
            skipped: whether the update was left out.
            evaluation: after it, if there was one.
        """
        seconds, flops = max(totals.seconds, 1e-9), mean(totals.flops, 1)
        text, image, contrastive = totals.loss_sums
        return cls(
            step=record.step,
            text_loss=mean(text, record.text_tokens),
            image_loss=mean(image, record.target_patches),
            contrastive_loss=mean(contrastive, pairs),
            grad_norm=mean(norm, 1),
            samples=totals.samples,
            sample_digest=digest_text(totals.sample_digest),
            images=totals.images,
            invalid_images=totals.invalid_images,
            seconds=totals.seconds,
            data_wait_percent=100 * totals.wait_ratio,
            lr=lr,
            tokens=totals.tokens,
            tokens_per_second=totals.tokens / seconds,
            images_per_second=totals.images / seconds,
            flops=flops,
            mfu_percent=None if flops is None or peak is None else 100 * flops / (seconds * peak),
            skipped=skipped,
            evaluation=evaluation,
        )


def contrastive_pairs(job: Job) -> int:
    """The denominator of a step's contrastive loss; 0 where there are no towers."""
    return 0 if job.stream.contrastive_batch is None else job.stream.global_batch


def digest_text(digest: int) -> str:
    """A sum of sample hashes as it is written."""
    return f"{digest & _MASK_63:016x}"


def mean(total: float, count: int) -> float | None:
    """None where there is none, or it is not finite, which JSON cannot say."""
    return total / count if count and math.isfinite(total) else None
