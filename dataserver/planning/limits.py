"""What no plan could get around, found in the sizes of every shard before a job begins.

A sample that fits alone can be planned: memory that does not hold a whole wave only makes waves more and smaller, down
to one sample in a wave, with empty waves between where interleaved chunks hold several waves at once.
"""

import numpy as np

from dataserver.planning.arranging import WaveTooLargeError, spread_images
from dataserver.planning.jobspec import BalancePolicy, ColocatedLayout, JobSpec, Modality, ModuleKind, ModuleSpec
from dataserver.planning.naming import counted
from dataserver.planning.samples import I64, Bool, ShardTable
from dataserver.planning.sizing import SampleTooLargeError, is_pair, may_be_generated, may_be_understood, most_tokens


def check_table(spec: JobSpec, dataset: int, table: ShardTable, where: str) -> None:
    """Refuse the samples of one shard that a job cannot train on.

    Args:
        spec: the job.
        dataset: position in the job's dataset list.
        table: the shard's samples.
        where: name of dataset and shard for messages.

    Raises:
        SampleTooLargeError: a module's memory cannot hold a sample or an image even alone.
        ValueError: images that no module handles, or a contrastive sample that is no pair.
    """
    if spec.stream.contrastive_batch is not None:
        _check_towers(spec, table, where)
        return
    wanted = {
        ModuleKind.ENCODER: may_be_understood(spec.stream, table),
        ModuleKind.GENERATOR: may_be_generated(spec.stream, table),
    }
    for kind, samples in wanted.items():
        module = spec.module_of_dataset(kind)[dataset]
        if module is None:
            _check_unhandled(spec.stream.datasets[dataset].name, kind, table, samples, where)
        else:
            _check_images(module, table, samples, where)
            if not isinstance(spec.execution.layout, ColocatedLayout):  # it has no waves
                _check_together(module, spec.execution.backbone.dp, table, samples, where)
    backbone = spec.execution.backbone
    groups = backbone.sequence_groups
    remedy = "lower stream.seq_len" if groups is None else "raise sequence_groups.max_degree, lower stream.seq_len"
    degree = 1 if groups is None else groups.max_degree
    _check_units(backbone, table.row, most_tokens(spec.stream, table), "tokens", degree, remedy, where)


def _check_towers(spec: JobSpec, table: ShardTable, where: str) -> None:
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
            _check_images(tower, table, np.ones(len(table.row), np.bool_), where)
        else:
            _check_units(tower, table.row, most_tokens(spec.stream, table), "tokens", 1, "lower stream.seq_len", where)


def _check_unhandled(name: str, kind: ModuleKind, table: ShardTable, samples: Bool, where: str) -> None:
    """Refuse images of a dataset without a module of a kind."""
    found = np.flatnonzero(samples & (np.diff(table.image_offsets) > 0))
    if len(found):
        purpose = "understand" if kind is ModuleKind.ENCODER else "generate"
        raise ValueError(
            f"{where}, row {table.row[found[0]]}: the sample has images to {purpose} ({len(found)} such samples in "
            f"this shard) but no module of kind {kind} handles dataset {name}; add one, name the dataset in the "
            "datasets of one, or leave such samples out with a filter or a quarantine list"
        )


def _check_images(module: ModuleSpec, table: ShardTable, samples: Bool, where: str) -> None:
    """Refuse images of some samples that the module cannot hold alone."""
    sample = np.repeat(np.arange(len(table.row)), np.diff(table.image_offsets))
    images = np.flatnonzero(samples[sample])
    patches = table.image_rows[images].astype(np.int64) * table.image_columns[images]
    rows = table.row[sample[images]]
    _check_units(module, rows, patches, "patches of an image", 1, "lower stream.sizing.max_patches", where)


def _check_together(module: ModuleSpec, backbone_dp: int, table: ShardTable, samples: Bool, where: str) -> None:
    """Refuse samples whose images the ranks of a module cannot hold together: they belong to one wave."""
    if module.memory is None:
        return
    patches = table.image_rows.astype(np.int64) * table.image_columns
    first, last = table.image_offsets[:-1], table.image_offsets[1:]
    before = np.concatenate([[0], np.cumsum(patches)])
    most = int(patches.max(initial=0)) * (last - first) if module.padded else before[last] - before[first]
    for i in np.flatnonzero(samples & (last - first > 1) & (most > module.memory.units)).tolist():
        sizes = patches[first[i] : last[i]]
        try:
            spread_images(module, sizes, np.zeros_like(sizes), np.zeros_like(sizes), backbone_dp, 1)
        except WaveTooLargeError as error:
            ranks = 1 if module.balance is BalancePolicy.NONE else module.dp
            raise SampleTooLargeError(
                f"{where}, row {table.row[i]}: its {len(sizes)} images, which belong to one wave, have {sizes.sum()} "
                f"patches{' before padding' if module.padded else ''}, but {counted(ranks, 'rank')} of module "
                f"{module.name} with memory for {module.memory.units} each cannot hold them; raise memory.room_bytes "
                "or dp of the module, lower stream.sizing.max_patches, or leave such samples out with a filter or a "
                "quarantine list"
            ) from error


def _check_units(module: ModuleSpec, row: I64, units: I64, name: str, degree: int, remedy: str, where: str) -> None:
    """Refuse items that `degree` ranks of a module cannot hold alone; int64 [k] their rows, int64 [k] their sizes."""
    if module.memory is None:
        return
    limit = module.memory.units * degree
    over = np.flatnonzero(units > limit)
    if len(over):
        worst = over[np.argmax(units[over])]
        ranks = f"{degree} ranks" if degree > 1 else "a rank"
        raise SampleTooLargeError(
            f"{where}, row {row[worst]}: it has {units[worst]} {name}, but the memory of {ranks} of module "
            f"{module.name} holds {limit} ({len(over)} too large in this shard); raise memory.room_bytes of the "
            f"module, {remedy}, or leave such samples out with a filter or a quarantine list"
        )
