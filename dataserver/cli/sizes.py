"""`dataserver sizes`: counts the sizes of a dataset's samples."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import tyro

from dataserver.assembly import BYTES, load_tokenizer
from dataserver.cli.arguments import (
    DatasetPath,
    MaybeInt,
    MaybePath,
    Switch,
    Text,
    Transforms,
    sizing_of,
    sizing_of_job,
    tokenizer_files,
)
from dataserver.cli.progress import progress_bar
from dataserver.dataset import OWN, Dataset, compile_filter, location
from dataserver.jobs import Counted, Rules, own_key, size_histogram, sizes_data, thinned
from dataserver.outputs import require_writable, tells_on, write_output
from dataserver.planning.job.fields import CutAt, Modality, Sizing, SplitAt
from dataserver.planning.plan.naming import counted as counted_of
from dataserver.planning.stream.captions import Captions
from dataserver.planning.stream.documents import Split
from dataserver.transforms import parse_transform

MaybeRule = Annotated[Literal["qwen", "naflex", "square", "crop", "pad"] | None, tyro.conf.arg(help_behavior_hint="")]
MIN_SEQ_LEN: Final = 8
"""The smallest `seq_len` that jobs accept."""
EMPTY: Final = 1
"""Exit status where no sample is left."""


@dataclass(frozen=True, slots=True)
class SizingFlags:
    """The sizing of a job, without a job."""

    patch: int = 14
    """Side of a patch in pixels, as in the job's sizing."""
    merge: int = 2
    """merge x merge patches become a token of the backbone."""
    max_patches: MaybeInt = None
    """Most patches of an image; larger ones are scaled down. 1024 by default, or what the rule allows."""
    rule: MaybeRule = None
    """Rule of the job's sizing, if it has one."""
    min_pixels: MaybeInt = None
    """Fewest pixels of an image, with rule qwen."""
    max_pixels: MaybeInt = None
    """Most pixels of an image, with rule qwen."""
    side: MaybeInt = None
    """Side of every image in pixels, with rules square, crop and pad."""

    def sizing(self, job: Path | None) -> Sizing:
        """The one of a job in a file, or without one what these flags say.

        Raises:
            ValueError: a flag is beyond what a job may have, the job cannot be used, or both say something.
        """
        if job is not None:
            if self != SizingFlags():
                raise ValueError(
                    f"--job {job} has the sizing, and flags for it are given as well; leave one of them out"
                )
            return sizing_of_job(job)
        if min(self.patch, self.merge) < 1 or (self.max_patches is not None and self.max_patches < self.merge**2):
            raise ValueError(
                f"--patch is {self.patch}, --merge {self.merge}, --max-patches {self.max_patches}; at least 1, 1 and "
                "merge^2 are required"
            )
        resampling = None if self.side is None else "bicubic"  # some sides need a filter, and none changes a grid
        given = {**asdict(self), "resampling": resampling}
        return sizing_of(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class LengthFlags:
    """What a job says of samples that are longer than a sequence, and of documents that are generated."""

    seq_len: MaybeInt = None
    """Tokens of a sequence. Longer documents are counted in parts of this length, as for a job that splits documents.
    Longer conversations are left out, as servers do."""
    cut_at: Annotated[CutAt | None, tyro.conf.arg(help_behavior_hint="")] = None
    """Where a conversation that is longer than --seq-len is cut, as `conversations` of a job says."""
    max_images: MaybeInt = None
    """Most images of a part, as `documents` says, or `packing` if that is less."""
    max_clips: MaybeInt = None
    """Most clips of a part."""
    max_videos: MaybeInt = None
    """Most videos of a part."""
    interleaved: Switch = False
    """Count for a job that generates images of documents (`generation.interleaved`): the file also has the text before
    each image, and pairs stay whole."""

    def split(self) -> Split | None:
        """How a job splits documents; None where they stay whole.

        Raises:
            ValueError: a flag cannot be used; says which, and what is required.
        """
        given = [most for most in self.budget if most is not None]
        if self.seq_len is None:
            if given:
                raise ValueError(
                    "--max-images, --max-clips and --max-videos are for parts of documents; give --seq-len as well, or "
                    "leave them out"
                )
            return None
        if self.seq_len < MIN_SEQ_LEN or min(given, default=1) < 1:
            raise ValueError(
                f"--seq-len is {self.seq_len}, --max-images {self.max_images}, --max-clips {self.max_clips}, "
                f"--max-videos {self.max_videos}; at least {MIN_SEQ_LEN}, and 1 of each other, are required"
            )
        return Split(str(SplitAt.ITEMS), self.seq_len, self.budget, pairs=not self.interleaved)

    def check(self, path: Path, are_chats: bool, caption: str) -> None:
        """Raise ValueError unless the flags suit what the dataset at a path holds."""
        if are_chats:
            if self.budget != (None, None, None) or self.interleaved or caption != OWN:
                raise ValueError(
                    f"{path} holds conversations, which are neither split nor generated, and have no captions; leave "
                    "--max-images, --max-clips, --max-videos, --interleaved and --caption out"
                )
            if self.cut_at is not None and self.seq_len is None:
                raise ValueError(f"--cut-at is {self.cut_at}, and nothing says how long a sequence is; give --seq-len")
        elif self.cut_at is not None:
            raise ValueError(f"--cut-at is {self.cut_at}, and {path} holds no conversations; leave it out")

    @property
    def budget(self) -> tuple[int | None, int | None, int | None]:
        """Most images, clips and videos of a part."""
        return self.max_images, self.max_clips, self.max_videos


NO_FLAGS: Final = SizingFlags()
NO_LENGTHS: Final = LengthFlags()


def sizes(
    path: DatasetPath,
    output: Path,
    index_dir: MaybePath = None,
    quarantine: MaybePath = None,
    filter: Text = "",  # noqa: A002
    transform: Transforms = (),
    tokenizer: str = BYTES,
    caption: str = OWN,
    job: MaybePath = None,
    flags: Annotated[SizingFlags, tyro.conf.arg(name="")] = NO_FLAGS,
    lengths: Annotated[LengthFlags, tyro.conf.arg(name="")] = NO_LENGTHS,
) -> None:
    """Write how many samples of a dataset have which size, for `trainclient orchestrate --sizes`.

    It reads only the dataset's index. Texts of nearly the same length count as one size; beyond 20,000 sizes,
    neighbouring ones are merged. Clips and videos are sized as the job says, or without a job as for Qwen2-Audio and
    Qwen2-VL.

    Args:
        path: Folder of shards.
        output: JSON file to write; - is stdout.
        index_dir: Folder of the dataset's index, if it is not beside the shards.
        quarantine: Quarantine list of the dataset.
        filter: Condition on columns, as in a job.
        transform: Transform of metadata that `dataserver index` applied, NAME=VERSION or NAME=VERSION:OPTIONS; may be
            repeated. The filter may name its columns, and samples that it leaves out do not count.
        tokenizer: Tokenizer by which `dataserver index` counted tokens, NAME=FILE or `bytes`; for conversations
            NAME=FOLDER with the chat template that rendered them.
        caption: Named caption whose tokens are counted, as in the job; `own` is the samples' own text.
        job: Job whose sizing is used, with its tiles, clips and videos, instead of the flags from --patch to --side.
        flags: The sizing.
        lengths: Long samples.
    """
    sizing, split, path = flags.sizing(job), lengths.split(), location(path)
    loaded = load_tokenizer(*next(iter(tokenizer_files([tokenizer]).items()), (BYTES, None)))
    require_writable("--output", output)
    dataset = Dataset.open(path, index_dir, quarantine)
    dataset.check_captions([caption])
    lengths.check(path, dataset.are_chats, caption)
    captions, seq_len = Captions((caption,)), None
    if dataset.are_chats:
        captions = Captions((own_key(dataset, loaded),), cut_at_turn=lengths.cut_at is not None)
        split, seq_len = None, lengths.seq_len
    metadata = tuple(parse_transform(entry).key() for entry in transform)
    rules = Rules(loaded.digest, sizing, filter, dataset.quarantine, captions, metadata=metadata, split=split)
    with progress_bar("counting sizes") as report:
        counted = size_histogram(dataset, rules, report, seq_len, lengths.interleaved)
    num_samples = sum(counted.sizes.values())
    left = num_samples + counted.chats["left_out"]
    dropped = _dropped(dataset, filter, left if split is None else None, metadata) if filter or metadata else ""
    if not num_samples:
        print(
            f"dataserver: no sample of {path} is left{dropped}{_long_chats(counted, seq_len)}; change the filter, the "
            "quarantine list or --seq-len",
            file=sys.stderr,
        )
        raise SystemExit(EMPTY)
    found = thinned(counted.sizes)
    write_output("--output", output, json.dumps(sizes_data(sizing, counted.media, found)) + "\n")
    told = tells_on(output)
    of = "" if len(found) == len(counted.sizes) else f", which stand for {len(counted.sizes)}"
    what = "samples" if split is None else "parts of samples"
    long_chats = _long_chats(counted, seq_len)
    print(f"{num_samples} {what} of {len(found)} sizes{of} are in {output}{dropped}{long_chats}", file=told)
    for name, total in counted.media.items():
        if total.items:
            each = {Modality.AUDIO: "clip", Modality.VIDEO: "video"}[name]
            print(f"{counted_of(total.items, each)}: {total.seconds:,.1f} s, {total.tokens:,} tokens", file=told)


def _long_chats(counted: Counted, seq_len: int | None) -> str:
    """What became of conversations that are longer than a sequence."""
    cut, left_out = counted.chats["cut"], counted.chats["left_out"]
    said = [f"{cut} are cut behind an answer"] * bool(cut) + [f"{left_out} are left out"] * bool(left_out)
    longer = counted_of(cut + left_out, "conversation")
    return f"; {longer} longer than {seq_len} tokens: {', '.join(said)}" if said else ""


def _dropped(dataset: Dataset, condition: str, num_samples: int | None, metadata: Sequence[str]) -> str:
    """Say how many samples a filter, transforms of metadata and the quarantine list drop, and how many of them for a
    null.

    They leave `num_samples`; None where only the parts of these were counted.
    """
    before = sum(shard.num_samples for shard in dataset.shards)
    compiled = compile_filter(condition) if condition else None
    if num_samples is None:
        num_samples = sum(int(shard.keep(compiled, dataset.quarantine, metadata).sum()) for shard in dataset.shards)
    nulls = 0 if compiled is None else sum(shard.dropped_for_nulls(compiled, metadata) for shard in dataset.shards)
    why = f", {nulls} of them because a column of the filter is null" if nulls else ""
    return f"; {before - num_samples} of {before} are dropped{why}"
