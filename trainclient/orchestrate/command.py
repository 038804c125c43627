"""`trainclient orchestrate`: chooses a layout and degrees for a model, a cluster and a dataset."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import yaml
from pydantic import Field, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from dataserver.job_files import read_values
from dataserver.outputs import require_writable, write_output
from dataserver.planning.job.fields import Modality, Sizing
from dataserver.planning.job.fields import Stream as JobStream
from dataserver.planning.job.fields import describe as describe_job
from trainclient.orchestrate.choice import Problem
from trainclient.orchestrate.cluster import cluster
from trainclient.orchestrate.networks import Network, read_network
from trainclient.orchestrate.plot import SUFFIXES, draw
from trainclient.orchestrate.profiled_costs import costs_of, read_profile
from trainclient.orchestrate.report import HEADINGS, advice, as_json, notes, reasons, rows
from trainclient.orchestrate.rescoring import stream_block
from trainclient.orchestrate.sample_sizes import read_sizes
from trainclient.orchestrate.solving import Solution, solve
from trainclient.orchestrate.workload import Stream, workload
from trainclient.training.config import describe
from trainclient.training.config_base import SAYS_ITSELF, Options, options_of

ABOUT = """Choose the layout of a job, and the degrees of its modules, for a model, a cluster and sizes of samples. It
solves every layout, plans and simulates the best choices on samples of these sizes, and prints the `execution` of a
job. It needs no GPU and no server. --config FILE.yaml gives the same options in a file; flags override it."""
WIDTH: Final = 130

MaybeText = Annotated[str | None, SAYS_ITSELF]
MaybePath = Annotated[Path | None, SAYS_ITSELF]
MaybeNumber = Annotated[float | None, SAYS_ITSELF]
MaybeInt = Annotated[int | None, SAYS_ITSELF]


class OrchestrateError(ValueError):
    """Options that do not make up a problem; the message names them."""


class Orchestrate(Options):
    """Options of `trainclient orchestrate`: model, cluster, data and job."""

    encoder: MaybeText = None
    """Model of the encoder of images: a preset (vit-h, tiny), a config.json of Hugging Face or its folder, or a .yaml
    file with layers, width, mlp_width, heads and groups. Of a config.json with a vision_config, that part."""
    audio_encoder: MaybeText = None
    """Model of the encoder of clips: the same (whisper-large, tiny); of a config.json with an audio_config, that
    part."""
    video_encoder: MaybeText = None
    """Model of the encoder of videos: as for images."""
    backbone: MaybeText = None
    """Model of the backbone: the same (llama3-7b, llama3-13b, llama3-70b, tiny); of a config.json with a text_config,
    that part."""
    generator: MaybeText = None
    """Model of the generator: the same (dit-1b, tiny)."""
    image_tower: MaybeText = None
    """Contrastive training, instead of the models above: model of the image tower (vit-h, tiny)."""
    text_tower: MaybeText = None
    """Contrastive training: model of the text tower (clip-text-h, tiny)."""
    contrastive_batch: MaybeInt = None
    """Contrastive training: samples per loss; by default the whole global batch."""
    frozen: Annotated[tuple[str, ...], SAYS_ITSELF] = ()
    """Modules to freeze: encoder, audio-encoder, video-encoder, backbone, generator; image, text."""
    gpu: str = "h100"
    """Kind of GPU: a800, h100 or h200."""
    gpus: Annotated[int, Field(ge=1)] = 8
    """Number of GPUs in the cluster."""
    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    """Number of GPUs per node; tensor parallelism stays within a node."""
    memory_gb: MaybeNumber = None
    """Memory of a GPU for modules, in 10^9 bytes; by default 90 % of what its kind has."""
    within_gb_s: MaybeNumber = None
    """Speed at which a GPU sends to others of its node, in 10^9 bytes per second; by default that of the profile, or of
    NVLink for its kind."""
    between_gb_s: MaybeNumber = None
    """Speed at which a GPU sends to other nodes, in 10^9 bytes per second: its share of the node's network. By default
    12.5 (a800) or 50 (h100, h200)."""
    max_tp: Annotated[int, Field(ge=1)] = 8
    """Largest degree of tensor parallelism to try, of 1, 2, 4 and 8."""
    sizes: MaybePath = None
    """Sizes of samples: a file written by `dataserver sizes`, or JSON or YAML with a list `samples`, each {count: 10,
    text_tokens: 40, patches: [256]}."""
    global_batch: Annotated[int, Field(ge=1)] = 128
    """Number of sequences in a step."""
    seq_len: Annotated[int, Field(ge=8)] = 8192
    """Longest sequence, in tokens."""
    merge: Annotated[int | None, Field(ge=1), SAYS_ITSELF] = None
    """Side of the block of patches that becomes one backbone token; by default that of the file of sizes, or 2."""
    fill: float = 0.97
    """Share of a sequence that packed samples fill."""
    packed: bool = True
    """Whether several samples share a sequence."""
    generation: float = 0.0
    """Share of image-text pairs whose image is generated."""
    interleaved: bool = False
    """Whether the same share of documents is generated as well, each up to one of its images. The file of sizes must
    then be written with the --interleaved of `dataserver sizes`."""
    query_tokens: Annotated[int, Field(ge=1)] = 64
    """Query tokens behind a caption, which condition the generator."""
    profile: MaybePath = None
    """Profile by `trainclient profile` on such GPUs; without it costs are computed from operations and bytes."""
    steps: Annotated[int | None, Field(ge=0), SAYS_ITSELF] = None
    """Steps to plan and simulate for the best three choices of each layout, each with other samples; 0 skips this. By
    default 1 for choices that could be the fastest, and 3 for the two fastest of all; on more than 128 GPUs only 1 for
    the best choice of each layout."""
    as_json: bool = False
    """Print the result as JSON."""
    plot: MaybePath = None
    """Draw the result to this .png, .svg or .pdf file; needs matplotlib."""
    output: MaybePath = None
    """Write the `execution` block to this YAML file as well."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: what was given cannot be used, or no layout fits.
    """
    options = _options(list(arguments))
    if options.plot is not None and options.plot.suffix.lower() not in SUFFIXES:
        raise OrchestrateError(
            f"--plot is {options.plot}; a file that ends in one of {', '.join(SUFFIXES)} is required"
        )
    for flag, path in (("--output", options.output), ("--plot", options.plot)):
        require_writable(flag, path)
    solution = solve(problem(options), options.steps)
    if options.output is not None:
        write_output("--output", options.output, block_text(solution))
    if options.plot is not None:
        draw(solution, options.plot)
    if options.as_json:
        sys.stdout.write(json.dumps(as_json(solution), indent=1) + "\n")
    else:
        show(solution)
    return 0


def _options(arguments: list[str]) -> Orchestrate:
    at = arguments.index("--config") if "--config" in arguments else -1
    default = Orchestrate()
    if at >= 0 and at + 1 < len(arguments):
        default = _from_file(Path(arguments[at + 1]))
        del arguments[at : at + 2]
    return options_of(Orchestrate, "orchestrate", ABOUT, arguments, default)


def _from_file(path: Path) -> Orchestrate:
    try:
        return Orchestrate.model_validate(read_values("--config", path, OrchestrateError))
    except ValidationError as error:
        raise OrchestrateError(f"--config {path} cannot be used: {describe(error)}") from None


def problem(options: Orchestrate) -> Problem:
    """What is to be solved.

    Raises:
        ValueError: an option cannot be used; names it and what would do.
    """
    if options.sizes is None:
        raise OrchestrateError("--sizes is missing: a file with the sizes of samples, as `dataserver sizes` writes it")
    sizes, models = read_sizes(options.sizes), networks(options)
    stream = _stream(options, sizes.sizing)
    profile = None if options.profile is None else read_profile(options.profile)
    within = options.within_gb_s
    if within is None and profile is not None and profile.within_gb_s is not None:
        within = float(profile.within_gb_s)
    devices = cluster(options.gpu, options.gpus, options.gpus_per_node, options.memory_gb, within, options.between_gb_s)
    table = None if profile is None else costs_of(profile, models, devices)
    found = Problem(_with_tiles(models, sizes.sizing), devices, workload(sizes.samples, stream), table, options.max_tp)
    data = stream_block(found)
    try:
        JobStream.model_validate(data)
    except ValidationError as error:
        raise OrchestrateError(f"no job has such a stream: {describe_job(error, data, JobStream)}") from None
    _check_modules(options, found)
    return found


def _check_modules(options: Orchestrate, found: Problem) -> None:
    """Every module has something to do, and all that samples hold has its module."""
    for network in found.networks:
        if not found.workload.load(network).rows:
            raise OrchestrateError(
                f"--{network.name} has nothing to do: no sample gives it a row; leave it out, or change --generation "
                f"({options.generation}) or the sizes"
            )
    if options.image_tower is not None:
        return
    given, stream = {n.name for n in found.networks}, found.workload.stream
    there = {item.modality for size in found.workload.sizes for item in stream.items(size)}
    images = Modality.IMAGE in there
    for name, what, needed, otherwise in (
        ("encoder", "images to encode", images and options.generation < 1, "set --generation to 1"),
        ("audio-encoder", "clips to encode", Modality.AUDIO in there, "take sizes without these"),
        ("video-encoder", "videos to encode", Modality.VIDEO in there, "take sizes without these"),
        ("generator", "images to generate", images and options.generation > 0, "set --generation to 0"),
    ):
        if needed and name not in given:
            raise OrchestrateError(f"the samples have {what}, and no --{name} is given; give one, or {otherwise}")


def _with_tiles(models: tuple[Network, ...], sizing: Sizing | None) -> tuple[Network, ...]:
    """The modules, with an encoder whose patches attend to those of their tile alone, as a job with tiles has it."""
    if sizing is None or sizing.tiles is None or sizing.side is None:
        return models
    tile = (sizing.side // sizing.patch) ** 2
    return tuple(
        replace(n, size=replace(n.size, window=tile, global_layers=0))
        if n.role.feeds and n.reads == Modality.IMAGE and not n.size.window
        else n
        for n in models
    )


def _stream(options: Orchestrate, sizing: Sizing | None) -> Stream:
    merge = options.merge or (2 if sizing is None else sizing.merge)
    if sizing is not None and merge != sizing.merge:
        raise OrchestrateError(
            f"--merge is {merge}, and {options.sizes} was made with merge {sizing.merge}; leave --merge out"
        )
    if options.interleaved and not options.generation:
        raise OrchestrateError("--interleaved is given, and --generation is 0: nothing is generated; raise it")
    towers, batch = options.image_tower is not None, options.contrastive_batch
    if not towers and batch is not None:
        raise OrchestrateError(f"--contrastive-batch is {batch}, but no towers are given; leave it out")
    if batch is not None and (batch < 1 or options.global_batch % batch):
        raise OrchestrateError(
            f"--contrastive-batch is {batch}; a divisor of --global-batch {options.global_batch} is required"
        )
    if towers and options.generation:
        raise OrchestrateError(f"--generation is {options.generation}; towers generate nothing, leave it out")
    return Stream(
        options.global_batch, options.seq_len, merge, options.fill, options.packed and not towers,
        options.generation, options.query_tokens, (batch or options.global_batch) if towers else None,
        options.interleaved, sizing,
    )  # fmt: skip


def _towers(options: Orchestrate) -> tuple[Network, ...]:
    others = [f"--{name}" for name, _, _, value in _modules(options) if value is not None]
    if options.image_tower is None or options.text_tower is None:
        raise OrchestrateError("contrastive training has two towers, --image-tower and --text-tower; give both")
    if others:
        raise OrchestrateError(f"contrastive training has no modules beside the towers; leave {', '.join(others)} out")
    towers = {"image": options.image_tower, "text": options.text_tower}
    _check_frozen(options, list(towers))
    read = (read_network("tower", model, name, name) for name, model in towers.items())
    return tuple(replace(n, frozen=n.name in options.frozen) for n in read)


def _check_frozen(options: Orchestrate, modules: Sequence[str]) -> None:
    unknown = sorted(set(options.frozen) - set(modules))
    if unknown:
        raise OrchestrateError(f"--frozen names {unknown}; the model has {list(modules)}")
    if set(modules) <= set(options.frozen):
        raise OrchestrateError("--frozen names all modules, so nothing would be trained; leave one out")


def networks(options: Orchestrate) -> tuple[Network, ...]:
    """The modules, with what each of them passes on."""
    if options.image_tower is not None or options.text_tower is not None:
        return _towers(options)
    if options.backbone is None:
        raise OrchestrateError("--backbone is missing: a preset, a config.json, or a .yaml file of sizes")
    given = [(name, kind, modality, value) for name, kind, modality, value in _modules(options) if value is not None]
    _check_frozen(options, [name for name, *_ in given])
    found: list[Network] = []
    for name, kind, modality, value in given:
        network = replace(read_network(kind, value, name, modality), frozen=name in options.frozen)
        trained_before = not network.role.feeds and any(not n.frozen for n in found)
        width = next((n.size.width for n in found if n.role.spine), 0)
        found.append(replace(network, input_gradient=trained_before, condition_width=width))
    return tuple(found)


def _modules(options: Orchestrate) -> list[tuple[str, str, Modality | None, str | None]]:
    """The modules that a model with a backbone may have: name, kind, what it reads where that is no image, and which
    it is."""
    return [
        ("encoder", "encoder", None, options.encoder),
        ("audio-encoder", "encoder", Modality.AUDIO, options.audio_encoder),
        ("video-encoder", "encoder", Modality.VIDEO, options.video_encoder),
        ("backbone", "backbone", None, options.backbone),
        ("generator", "generator", None, options.generator),
    ]


def show(solution: Solution) -> None:
    """Print what was found for people."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    cluster, shown = solution.problem.cluster, Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    console.print(
        f"{cluster.gpus} {cluster.gpu} of {cluster.memory_bytes / 1e9:.0f} GB, {cluster.gpus_per_node} per node; "
        + ", ".join(f"{n.name} {n.parameters / 1e9:.2f}B{' frozen' if n.frozen else ''}"
                    for n in solution.problem.networks)
    )  # fmt: skip
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading[:3] in ("lay", "mod") else "right")
    for row in rows(solution):
        shown.add_row(*row)
    console.print(shown)
    if any(s.not_run is not None for s in solution.scored):
        console.print("*: servers plan and serve it, this trainer does not run it yet")
    console.print("r: computes activations again; MFU of all GPUs of the cluster, over the time as it is best known")
    for line in notes(solution):
        console.print(line, highlight=False)
    for line in (*reasons(solution), *advice(solution)):
        console.print(line, highlight=False)
    console.print(f"solved in {solution.solving_s:.2f} s, planned and simulated in {solution.scoring_s:.2f} s")
    sys.stdout.write(block_text(solution))


def block_text(solution: Solution) -> str:
    """The `execution` of a job as YAML: of the fastest that the trainer runs, or of the fastest."""
    chosen = solution.ready or solution.scored[0]
    marked = "" if chosen.not_run is None else f"# This trainer does not run it yet: {chosen.not_run}\n"
    return marked + yaml.safe_dump({"execution": dict(chosen.block)}, sort_keys=False)
