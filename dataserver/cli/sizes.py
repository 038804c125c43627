"""`dataserver sizes`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from dataserver.assembly import BYTES, load_tokenizer
from dataserver.cli.arguments import MaybeInt, MaybePath, sizing_of, sizing_of_job, tokenizer_files
from dataserver.cli.progress import progress_bar
from dataserver.dataset import OWN, Dataset, compile_filter, location
from dataserver.jobs import Rules, own_key, size_histogram, thinned
from dataserver.outputs import require_writable, tells_on, write_output
from dataserver.planning.job.fields import SplitAt
from dataserver.planning.stream.captions import Captions
from dataserver.planning.stream.documents import Split

MaybeRule = Annotated[Literal["qwen", "naflex", "square", "crop"] | None, tyro.conf.arg(help_behavior_hint="")]
MIN_SEQ_LEN: Final = 8
"""As jobs have it."""
EMPTY: Final = 1
"""Exit status where no sample is left."""


def sizes(
    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")],
    output: Path,
    index_dir: MaybePath = None,
    quarantine: MaybePath = None,
    filter: str = "",  # noqa: A002
    tokenizer: str = BYTES,
    caption: str = OWN,
    job: MaybePath = None,
    patch: int = 14,
    merge: int = 2,
    max_patches: MaybeInt = None,
    rule: MaybeRule = None,
    min_pixels: MaybeInt = None,
    max_pixels: MaybeInt = None,
    side: MaybeInt = None,
    seq_len: MaybeInt = None,
    max_images: MaybeInt = None,
) -> None:
    """Write how many samples of a dataset have which size, for `trainclient orchestrate --sizes`.

    Reads the dataset's index; no image is decoded. Texts of nearly the same length count as one
    size; beyond 20,000 sizes, neighbouring ones are merged.

    Args:
        path: Folder of shards.
        output: JSON file to write; - is stdout.
        index_dir: Folder of the dataset's index, where it does not lie beside the shards.
        quarantine: Quarantine list of the dataset.
        filter: Condition over sidecar columns, as a job has it.
        tokenizer: Tokenizer whose tokens were counted, NAME=FILE or `bytes`; of conversations NAME=FOLDER with the chat
            template that rendered them.
        caption: Named caption whose tokens count, as the job has it; `own` is the samples' own text.
        job: Job whose sizing counts, also with tiles, instead of --patch and all below to --side.
        patch: Side of a patch in pixels, as in the job's sizing.
        merge: merge x merge patches become a token of the backbone.
        max_patches: Most patches of an image; larger ones are scaled down. 1024 by default, or what the rule allows.
        rule: Rule of the job's sizing, where it has one.
        min_pixels: Fewest pixels of an image, with rule qwen.
        max_pixels: Most pixels of an image, with rule qwen.
        side: Side of every image in pixels, with rules square, crop and pad.
        seq_len: Sequences of a job that splits long documents (`documents` of a dataset): the parts are counted.
        max_images: Most images of a part, as `documents` says, or `packing` if that is less.
    """
    if min(patch, merge) < 1 or (max_patches is not None and max_patches < merge**2):
        raise ValueError(
            f"--patch is {patch}, --merge {merge}, --max-patches {max_patches}; at least 1, 1 and merge^2 are required"
        )
    split = _split(seq_len, max_images)
    path = location(path)
    of_rule = {"rule": rule, "min_pixels": min_pixels, "max_pixels": max_pixels, "side": side}
    resampling = None if side is None else "bicubic"  # some sides need a filter, and none changes a grid
    given = {"patch": patch, "merge": merge, "max_patches": max_patches, **of_rule, "resampling": resampling}
    plain = {"patch": 14, "merge": 2}
    stated = {name: value for name, value in given.items() if value is not None}
    if job is not None and stated != plain:
        raise ValueError(f"--job {job} has the sizing, and flags for it are given as well; leave one of them out")
    sizing = sizing_of(**stated) if job is None else sizing_of_job(job)
    named = tokenizer_files([tokenizer])
    loaded = load_tokenizer(*next(iter(named.items()), (BYTES, None)))
    require_writable("--output", output)
    dataset = Dataset.open(path, index_dir, quarantine)
    dataset.check_captions([caption])
    if dataset.are_chats:
        if split is not None or caption != OWN:
            raise ValueError(
                f"{path} holds conversations, which are neither split nor have captions; leave --seq-len, "
                "--max-images and --caption out"
            )
        caption = own_key(dataset, loaded)
    rules = Rules(loaded.digest, sizing, filter, dataset.quarantine, Captions((caption,)), split=split)
    with progress_bar("counting sizes") as report:
        counted = size_histogram(dataset, rules, report)
    found = thinned(counted)
    samples = [
        {"count": count, **{name: value for name, value in size._asdict().items() if value != () or name == "patches"}}
        for size, count in sorted(found.items())
        if size.text_tokens or size.patches
    ]
    cut = {} if sizing.tiles is None or sizing.side is None else {"tile_patches": (sizing.side // sizing.patch) ** 2}
    num_samples = sum(found.values())
    dropped = _dropped(dataset, filter, num_samples if split is None else None) if filter else ""
    if not num_samples:
        print(
            f"dataserver: no sample of {path} is left{dropped}; change the filter or the quarantine list",
            file=sys.stderr,
        )
        raise SystemExit(EMPTY)
    write_output("--output", output, json.dumps({**cut, "samples": samples}) + "\n")
    of = "" if len(found) == len(counted) else f", which stand for {len(counted)}"
    what = "samples" if split is None else "parts of samples"
    print(f"{num_samples} {what} of {len(samples)} sizes{of} are in {output}{dropped}", file=tells_on(output))


def _split(seq_len: int | None, max_images: int | None) -> Split | None:
    """How a job splits documents without generation."""
    if seq_len is None:
        if max_images is not None:
            raise ValueError("--max-images is for parts of documents; give --seq-len as well, or leave it out")
        return None
    if seq_len < MIN_SEQ_LEN or (max_images is not None and max_images < 1):
        raise ValueError(
            f"--seq-len is {seq_len}, --max-images {max_images}; at least {MIN_SEQ_LEN} and 1 are required"
        )
    return Split(str(SplitAt.ITEMS), seq_len, (max_images, None, None), pairs=True)


def _dropped(dataset: Dataset, condition: str, num_samples: int | None) -> str:
    """Say how many samples a filter and the quarantine list drop, and how many of them for a null.

    They leave `num_samples`; None where only the parts of these were counted.
    """
    before = sum(shard.num_samples for shard in dataset.shards)
    compiled = compile_filter(condition)
    if num_samples is None:
        num_samples = sum(int(shard.keep(compiled, dataset.quarantine).sum()) for shard in dataset.shards)
    nulls = sum(shard.dropped_for_nulls(compiled) for shard in dataset.shards)
    why = f", {nulls} of them because a column of the filter is null" if nulls else ""
    return f"; {before - num_samples} of {before} are dropped{why}"
