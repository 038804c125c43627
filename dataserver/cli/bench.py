"""`dataserver bench`: measures how many cores a dataset needs."""

import math
from typing import Annotated, Final, Literal

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dataserver.cli.arguments import (
    DatasetPath,
    MaybeInt,
    MaybePath,
    Transforms,
    sizing_of,
    sizing_of_job,
    transforms_of_job,
)
from dataserver.cli.tables import console_for_tables
from dataserver.cli.throughput import READING, WARM_SAMPLES, Decoded, Made, Maker, Rate, images_of, sampled
from dataserver.cli.transform_costs import TransformCost, pixel_transforms, transform_cost
from dataserver.dataset import Dataset, location, usable_cores
from dataserver.images import silence_pillow_warnings
from dataserver.planning.plan.naming import counted
from dataserver.transforms import TransformFailedError, TransformUnavailableError

MaybeFilter = Annotated[Literal["bilinear", "bicubic", "lanczos"] | None, tyro.conf.arg(help_behavior_hint="")]
MAX_SAMPLES: Final = 100_000
MAX_THREADS: Final = 1024
MAX_RATE: Final = 10**9
RATES: Final = (100, 300, 1_000, 3_000, 10_000)
"""Images a second, where none is asked for."""


def bench(
    path: DatasetPath,
    index_dir: MaybePath = None,
    samples: Annotated[int, tyro.conf.arg(help_behavior_hint="")] = 400,
    rate: MaybeInt = None,
    threads: MaybeInt = None,
    job: MaybePath = None,
    max_patches: Annotated[int, tyro.conf.arg(help_behavior_hint="")] = 1024,
    quality: Annotated[Literal["fast", "exact"], tyro.conf.arg(help_behavior_hint="")] = "fast",
    resampling: MaybeFilter = None,
    transform: Transforms = (),
) -> None:
    """Measure how many cores a rate of images, clips and videos needs on an indexed dataset, and what limits it.

    It reads and decodes samples from all shards with the functions of the servers: once on one thread, once on all. The
    result holds for this machine, as busy as it is now, and for its storage.

    Args:
        path: Folder of shards, or a single shard.
        index_dir: Folder of the index, if it is not beside the shards.
        samples: Number of samples to decode; 400 by default.
        rate: Images, clips and videos per second that training needs; by default a table of rates is printed.
        threads: Threads of the second measurement; one for each core by default.
        job: Job whose sizing is used, with its rule, tiles, clips and videos, instead of --max-patches, --quality and
            --resampling. The cost of the built-in transforms that it names is measured too.
        max_patches: Largest number of patches of an image, as in the job's sizing; 1024 by default.
        quality: Quality of decoding, as in the job's sizing; fast by default.
        resampling: Filter of Pillow, as in the job's sizing; the server's own bilinear one by default.
        transform: Installed transform of pixels whose cost is measured too, NAME=VERSION or NAME=VERSION:OPTIONS with
            an object of JSON; may be repeated.
    """
    cores = usable_cores()
    threads = cores if threads is None else threads
    _check("--samples", samples, MAX_SAMPLES)
    _check("--threads", threads, MAX_THREADS)
    _check("--rate", 1 if rate is None else rate, MAX_RATE)
    of_filter = {} if resampling is None else {"resampling": resampling}
    if job is not None and (max_patches, quality, resampling) != (1024, "fast", None):
        raise ValueError(f"--job {job} has the sizing, and flags for it are given as well; leave one of them out")
    stated = {"max_patches": max_patches, "quality": quality, **of_filter}
    sizing = sizing_of(**stated) if job is None else sizing_of_job(job)
    silence_pillow_warnings()
    pool, installed = pixel_transforms(transform)
    wanted = (*(() if job is None else transforms_of_job(job)), *installed)
    path = location(path)
    dataset = Dataset.open(path, index_dir)
    maker = Maker(dataset, sizing)
    chosen = sampled(dataset, samples, sizing)
    if not any(sample.images for sample in chosen):
        raise ValueError(
            f"none of {len(chosen)} samples of {path} has an image, a clip or a video; bench measures how fast "
            "these are made"
        )
    has_images = any(sample.images for sample in images_of(chosen))
    if installed and not has_images:
        raise ValueError(f"none of {len(chosen)} samples of {path} has an image to transform; leave --transform out")
    maker.make(chosen[:: max(1, len(chosen) // WARM_SAMPLES)])
    made = maker.make(chosen)
    rates = [maker.rate(chosen, number) for number in sorted({1, threads})]
    console = console_for_tables()
    console.print(
        f"{len(chosen)} of {sum(shard.num_samples for shard in dataset.shards)} samples, spread evenly over "
        f"{len(dataset.shards)} shards, with {made.num_images} {_what(made)}; measured on this machine, {cores} cores"
    )
    _show(console, made, rates, RATES if rate is None else (rate,))
    if wanted and has_images:
        try:
            cost = transform_cost(dataset, sizing, images_of(chosen), pool, wanted)
        except (TransformFailedError, TransformUnavailableError) as error:
            raise ValueError(f"{error}; mend the transform, or leave --transform out") from error
        _show_cost(console, cost)


def _check(flag: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ValueError(f"{flag} is {value}; 1 to {most} is required")


def _show(console: Console, made: Made, rates: list[Rate], wanted: tuple[int, ...]) -> None:
    what = _what(made)
    console.print(_formats(made), _stages(made), _rates(rates, what))
    of_core = rates[-1].images / rates[-1].cores
    for images in wanted:
        cores = cores_for(images, of_core)
        console.print(f"for {images:,} {what}/s you need {counted(cores, 'core')} like these", highlight=False)
    if limiting_stage(made) == READING:
        console.print("storage limits: more cores wait for it as well; serve from faster storage, or with more servers")
    console.print(f"counted with {of_core:.0f} {what}/s of a busy core. Planning and sending come on top.")


def _show_cost(console: Console, cost: TransformCost) -> None:
    said = f"CPU time of an image: {cost.without_ms:.2f} ms without the transforms, {cost.with_ms:.2f} ms with them"
    if cost.handing_over_ms is not None:
        said += f"; to hand pixels to their processes and back takes {cost.handing_over_ms:.2f} ms of that"
    console.print(said, highlight=False)


def limiting_stage(made: Made) -> str:
    """The stage that took most."""
    return max(made.stages_s, key=lambda stage: made.stages_s[stage])


def cores_for(images: float, of_core: float) -> int:
    """Cores that make so many images a second, where each makes `of_core`."""
    return math.ceil(images / of_core)


def _what(made: Made) -> str:
    """What was made, in a word."""
    return "items" if made.lasting_s else "images"


def _formats(made: Made) -> Table:
    what, lasting = _what(made), ["s"] if made.lasting_s else []
    table = _table("format", what, "invalid", "Mpixel", *lasting, "kB", "decoding", f"{what}/s")
    for name, decoded in sorted(made.by_format.items()):
        table.add_row(name, *_format_cells(decoded, bool(lasting)))
    return table


def _format_cells(decoded: Decoded, lasting: bool) -> tuple[str, ...]:
    n = decoded.images
    return (
        str(n),
        str(decoded.invalid),
        f"{decoded.pixels / n / 1e6:.2f}" if decoded.pixels else "-",
        *([f"{decoded.lasting_s / n:.2f}" if decoded.lasting_s else "-"] if lasting else []),
        f"{decoded.num_bytes / n / 1e3:.0f}",
        f"{1e3 * decoded.seconds / n:.2f} ms",
        f"{n / decoded.seconds:.0f}",
    )


def _stages(made: Made) -> Table:
    table = _table("stage", "seconds", "share", "")
    limiting = limiting_stage(made)
    for stage, seconds in made.stages_s.items():
        table.add_row(stage, f"{seconds:.3f}", f"{seconds / made.seconds:.0%}", "limits" if stage == limiting else "")
    return table


def _rates(rates: list[Rate], what: str) -> Table:
    table = _table("threads", f"{what}/s", "busy cores", f"{what}/s of a busy core")
    for rate in rates:
        table.add_row(str(rate.threads), f"{rate.images:.0f}", f"{rate.cores:.2f}", f"{rate.images / rate.cores:.0f}")
    table.caption = "fewer busy cores than threads: other work took them, or storage is slow"
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD)
    for title in others:
        table.add_column(title, justify="right")
    return table
