"""What contrastive batches need at the worst, found before a job begins, and what to change where that is too much.

All microbatches of a contrastive batch wait for its barrier, so that no plan can spread them over more time: a rank
holds its part of the batch at once, or the step cannot be run.
"""

from collections.abc import Callable, Iterator, Sequence
from math import gcd, lcm

import numpy as np

from dataserver.planning import I64, Bool
from dataserver.planning.job.fields import BalancePolicy, Modality, ModuleKind, ModuleSpec
from dataserver.planning.job.spec import JobSpec
from dataserver.planning.layouts.contrastive.batches import barrier_units
from dataserver.planning.layouts.contrastive.options import MAX_MICROBATCHES, ContrastiveOptions
from dataserver.planning.layouts.shared.limits import (
    check_images,
    check_units,
    fit_units,
    largest_pair_images,
    longest_samples,
)
from dataserver.planning.plan.naming import counted, unit_of
from dataserver.planning.stream.item_sizes import is_pair
from dataserver.planning.stream.samples import ShardTable
from dataserver.planning.stream.sizing import MicrobatchTooLargeError, most_tokens
from dataserver.planning.stream.statistics import ShardStatistics, longest_pairs

Sizes = Callable[[ModuleSpec, int], I64]
"""Tower and contrastive batch: int64 [batches, samples], the patches or tokens of the samples of each batch."""


class TowerMemoryError(MicrobatchTooLargeError):
    """Microbatches that wait for a barrier, or are in flight, and that the memory of a tower does not hold."""


class TowerLimits:
    """The `layout.Limits` of towers: single samples, and what one contrastive batch could have to hold together.

    A job whose `check` passes can be planned: in every step and tower there is an arrangement within memory
    (`contrastive.barrier_units`), whichever samples meet.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._towers = [t for t in spec.execution.of_kind(ModuleKind.TOWER) if t.memory is not None]
        self._sizes: dict[tuple[Modality, int], I64] = {}
        """By modality and dataset, largest first."""

    def add_statistics(self, dataset: int, statistics: ShardStatistics) -> Bool:
        """Say which shards have nothing that could be refused; keep the largest samples of those.

        A shard is not among them if a text that its statistics does not list could be one of the largest.
        """
        stream, batch = self._spec.stream, self._spec.stream.contrastive_batch or 0
        clear: Bool = statistics.pairs == statistics.samples
        for tower in self._spec.execution.modules:
            largest = (
                largest_pair_images(stream, statistics)
                if tower.modality is Modality.IMAGE
                else longest_samples(stream, statistics)
            )
            clear &= fit_units(tower, largest, 1)
        texts = statistics.long_texts
        if Modality.TEXT in self._modalities():
            kept = np.sort(texts.values)[-batch:]
            clear &= statistics.unlisted_pair_text() <= (kept[0] if len(kept) == batch else 0)
        for modality in self._modalities():
            if modality is Modality.TEXT:
                listed = texts.values[texts.spread(clear)].astype(np.int64)
                sizes = np.minimum(longest_pairs(stream, np.zeros_like(listed), listed), stream.seq_len)
            else:
                of_clear = statistics.pair_images.spread(clear)
                values = statistics.pair_images.values[of_clear].astype(np.int64)
                counts = statistics.pair_image_counts.values[of_clear].astype(np.int64)
                largest_first = np.argsort(-values, kind="stable")
                most = largest_first[: np.searchsorted(np.cumsum(counts[largest_first]), batch) + 1]
                sizes = np.repeat(values[most] * stream.sizing.merge**2, np.minimum(counts[most], batch))
            self._keep(modality, dataset, sizes)
        return clear

    def add(self, dataset: int, table: ShardTable, where: str) -> None:
        """Refuse samples that are no pairs, or too large alone; keep the largest, as many as a batch has."""
        _check_pairs(self._spec, table, where)
        for modality in self._modalities():
            if modality is Modality.TEXT:
                sizes = most_tokens(self._spec.stream, table)
            else:
                sizes = table.image_rows.astype(np.int64) * table.image_columns
            self._keep(modality, dataset, sizes)

    def _keep(self, modality: Modality, dataset: int, sizes: I64) -> None:
        """Keep the largest of some sizes, int64 [n], and of those that are kept: as many as a batch has."""
        batch = self._spec.stream.contrastive_batch or 0
        kept = self._sizes.get((modality, dataset), np.zeros(0, np.int64))
        more = sizes[sizes > kept[-1]] if len(kept) == batch else sizes  # few, so that many shards take no time
        self._sizes[modality, dataset] = -np.sort(-np.concatenate([kept, more]))[:batch] if len(more) else kept

    def check(self, repeats: Sequence[int]) -> None:
        """Refuse a job with a contrastive batch, the samples that must be held together, that memory might not hold.

        Raises:
            TowerMemoryError: names the towers, what they would need, and changes that would do.
        """
        batch = self._spec.stream.contrastive_batch
        largest = {modality: self._largest(modality, repeats) for modality in self._modalities()}

        def sizes(tower: ModuleSpec, batch: int) -> I64:
            return largest[Modality.TEXT if tower.holds_samples else Modality.IMAGE][None, :batch]

        if batch is None or _fits(self._spec, sizes, batch, _microbatches(self._spec)):
            return
        needs, budgets = [], []
        for tower in self._towers:
            need = _need(tower, sizes(tower, batch), _microbatches(self._spec))
            if tower.memory is not None and need > tower.memory.units:
                needs.append(
                    f"{need:,} {unit_of(tower)} on a rank of {tower.name}, whose memory holds {tower.memory.units:,}"
                )
                budgets.append(f"of {tower.name} to {need * tower.memory.unit_bytes}")
        raise TowerMemoryError(
            f"the largest samples of the datasets may meet in one contrastive batch of {counted(batch, 'sample')}, "
            f"which waits for a barrier as a whole; then there must be room for {', and '.join(needs)}: raise "
            f"memory.budget_bytes {', and '.join(budgets)}"
            f"{remedies(self._spec, sizes, self._spec.stream.global_batch)}, or leave the largest samples out with a "
            "filter or a quarantine list"
        )

    def _modalities(self) -> set[Modality]:
        return {t.modality for t in self._towers if t.modality is not None}

    def _largest(self, modality: Modality, repeats: Sequence[int]) -> I64:
        """The sizes of the fullest contrastive batch, largest first."""
        batch = self._spec.stream.contrastive_batch or 0
        parts = [np.repeat(self._sizes[modality, dataset], min(n, batch)) for dataset, n in enumerate(repeats) if n]
        found: I64 = -np.sort(-np.concatenate(parts))[:batch]
        return found


def _check_pairs(spec: JobSpec, table: ShardTable, where: str) -> None:
    others = np.flatnonzero(~is_pair(table))
    if len(others):
        images, tokens = np.diff(table.image_offsets)[others[0]], table.text_tokens[others[0]]
        raise ValueError(
            f"{where}, row {table.row[others[0]]}: the sample has {counted(images, 'image')} and "
            f"{counted(tokens, 'text token')}; for contrastive training it needs one image and some text "
            f"({counted(len(others), 'other')} in this shard), leave such samples out with a filter or a quarantine "
            "list"
        )
    for tower in spec.execution.modules:
        if tower.modality is Modality.IMAGE:
            check_images(tower, spec.stream.sizing, table, np.ones(len(table.row), np.bool_), where)
        else:
            check_units(tower, table.row, most_tokens(spec.stream, table), "tokens", 1, "lower stream.seq_len", where)


def remedies(spec: JobSpec, sizes: Sizes, num_samples: int) -> str:
    """Changes that each make room for some samples in every tower, for a message; empty if there is none.

    Args:
        spec: the job.
        sizes: of the samples.
        num_samples: how many there are; a smaller batch divides them, as it does `global_batch`.
    """
    batch, found = spec.stream.contrastive_batch or 1, ""
    smaller = next((b for b in _smaller_batches(spec, num_samples) if _fits(spec, sizes, b, _microbatches(spec))), None)
    if smaller is not None:
        found += f", or lower stream.contrastive_batch to {smaller}"
    finer = next((n for n in _more_microbatches(spec) if _fits(spec, sizes, batch, n)), None)
    if finer is not None:
        found += f", or raise layout.microbatches to {finer}"
    return found


def _smaller_batches(spec: JobSpec, num_samples: int) -> Iterator[int]:
    """Contrastive batches that the job could have instead, largest first; one sample alone has no contrast."""
    count = _microbatches(spec)
    step = lcm(*(t.dp * count for t in spec.execution.modules))
    whole = gcd(spec.stream.global_batch, num_samples)
    largest = ((spec.stream.contrastive_batch or 1) - 1) // step * step
    return (b for b in range(largest, 1, -step) if whole % b == 0)


def _more_microbatches(spec: JobSpec) -> Iterator[int]:
    """Microbatches that each rank could have instead, which leave less to pad."""
    batch = spec.stream.contrastive_batch or 1
    each = gcd(*(batch // t.dp for t in spec.execution.modules))
    return (n for n in range(_microbatches(spec) + 1, min(each, MAX_MICROBATCHES) + 1) if each % n == 0)


def _fits(spec: JobSpec, sizes: Sizes, batch: int, microbatches: int) -> bool:
    """Whether every tower has an arrangement within its memory."""
    return all(
        _need(t, sizes(t, batch), microbatches) <= t.memory.units
        for t in spec.execution.modules
        if t.memory is not None
    )


def _need(tower: ModuleSpec, sizes: I64, microbatches: int) -> int:
    return barrier_units(sizes, tower.dp, microbatches, tower.padded, tower.balance is BalancePolicy.NONE)


def _microbatches(spec: JobSpec) -> int:
    return spec.execution.options(ContrastiveOptions).microbatches
