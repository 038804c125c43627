"""`dataserver plan`."""

from pathlib import Path
from typing import Any, Final

import yaml
from google.protobuf.json_format import MessageToJson

from dataserver.cli.arguments import MaybePath, Pairs, Switch, given, named_paths
from dataserver.cli.pages import write_page
from dataserver.cli.pictures import draw_plan
from dataserver.cli.tables import console_for_tables, show_plan
from dataserver.cli.trace import write_trace
from dataserver.planning.identity import parse_job
from dataserver.planning.planner import explain
from dataserver.serving.catalog import Catalog, fill_job
from dataserver.serving.config import MAX_CONFIG_BYTES, load_config
from dataserver.serving.jobs import JobPlanner
from dataserver.serving.plan_message import plan_message
from dataserver.serving.registry import make_planner

PICTURES: Final = (".png", ".svg", ".pdf", ".html")


def plan(
    job: Path,
    step: int,
    dataset: Pairs = (),
    index_dir: Pairs = (),
    quarantine: Pairs = (),
    tokenizer: Pairs = (),
    config: MaybePath = None,
    json: Switch = False,
    plot: MaybePath = None,
    trace: MaybePath = None,
) -> None:
    """Show how one step of a job is planned: loads, simulated time, what was decided and why, where each sample goes.

    Before is the step in canonical order, after is the plan.

    No server is needed: the plan depends on the indexes alone. Fingerprints, quarantine digests and the tokenizer's
    block may be left out of the job; they are filled in from the datasets and tokenizers named here.

    Args:
        job: YAML or JSON file of the job.
        step: Step, from 0.
        dataset: Dataset by the logical name that the job uses; may be repeated.
        index_dir: Folder of a dataset's index, where it does not lie beside the shards; may be repeated.
        quarantine: Quarantine list of a dataset; may be repeated.
        tokenizer: Hugging Face tokenizers file by logical name; may be repeated. `bytes` is built in.
        config: YAML file of a server, for the same names.
        json: Print the plan as JSON (message disttrain.v1.StepPlan), all samples included.
        plot: Draw loads and timeline, before and after, to this .png, .svg, .pdf or .html file.
        trace: Write the planned step's operations to this JSON file, which ui.perfetto.dev opens.
    """
    if step < 0:
        raise ValueError(f"--step is {step}; steps are counted from 0")
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot is {plot}; a file that ends in one of {', '.join(PICTURES)} is required")
    planner = open_job(job, dataset, index_dir, quarantine, tokenizer, config)
    parsed = planner.job
    planned = planner.plan(step)
    summary = explain(parsed, planned)
    message = plan_message(parsed, planned, summary)
    if trace is not None:
        write_trace(parsed, planned, summary.after, trace)
    if plot is not None and plot.suffix.lower() == ".html":
        write_page(parsed, planned, summary, plot)
    elif plot is not None:
        draw_plan(summary, f"step {step} of job {parsed.job_id[:12]}, as simulated", plot)
    if json:
        print(MessageToJson(message, preserving_proto_field_name=True))
    else:
        show_plan(console_for_tables(), parsed.spec.execution, message, planner.num_steps)


def open_job(
    job: Path, dataset: Pairs, index_dir: Pairs, quarantine: Pairs, tokenizer: Pairs, config: Path | None
) -> JobPlanner:
    """The planner of the job in a file, over the datasets and tokenizers that the flags name.

    Raises:
        ValueError: the file, a flag, or what they name cannot be used.
        DataServiceError: the job does not fit the datasets.
    """
    flags = given(
        datasets=named_paths("dataset", dataset),
        index_dirs=named_paths("index-dir", index_dir),
        quarantines=named_paths("quarantine", quarantine),
        tokenizers=named_paths("tokenizer", tokenizer),
    )
    catalog = Catalog.open(load_config(config, flags))
    parsed = parse_job(fill_job(read_job(job), catalog))
    datasets = catalog.find_datasets(parsed.stream)
    catalog.find_tokenizer(parsed.stream.tokenizer)
    return make_planner(parsed, datasets)


def read_job(file: Path) -> Any:
    """What a job's YAML or JSON file holds.

    Raises:
        ValueError: it cannot be read, or is no YAML.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"the job {file} has more than {MAX_CONFIG_BYTES} bytes; a job specification is required")
        return yaml.safe_load(content)
    except OSError as error:
        raise ValueError(f"the job {file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"the job {file} is not valid YAML: {error}") from None
