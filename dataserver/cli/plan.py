"""`dataserver plan`: shows how one step of a job is planned."""

from pathlib import Path
from typing import Final

from google.protobuf.json_format import MessageToJson

from dataserver.cli.arguments import MaybePath, Switch
from dataserver.cli.jobs import NO_DATA, Data, open_job
from dataserver.cli.pages import write_page
from dataserver.cli.pictures import draw_plan
from dataserver.cli.tables import console_for_tables, show_plan
from dataserver.cli.trace import write_trace
from dataserver.outputs import STDOUT, descriptor_of, require_writable, tells_on, writing
from dataserver.planning.planner import ablation, explain
from dataserver.reporting.ablation import mean_ablation
from dataserver.serving.plan_message import plan_message

PICTURES: Final = (".png", ".svg", ".pdf", ".html")


def plan(
    job: Path,
    step: int,
    data: Data = NO_DATA,
    json: Switch = False,
    plot: MaybePath = None,
    trace: MaybePath = None,
) -> None:
    """Show how one step of a job is planned: loads, simulated time, what was decided and why, where each sample goes.

    "Before" is the baseline: the step in canonical order, with equally many items on every rank. "After" is the plan.
    The ablation shows what lies between, one change at a time.

    No server is needed, because the plan depends only on the indexes. The job may leave out fingerprints,
    quarantine digests and `tokenizer`; they are filled in from the datasets and tokenizers named here.

    Args:
        job: YAML or JSON file of the job.
        step: Step, from 0.
        data: Datasets and tokenizers.
        json: Print the plan as JSON (message disttrain.v1.StepPlan), all samples included.
        plot: Draw loads and timeline, before and after, to this .png, .svg, .pdf or .html file.
        trace: Write the planned step's operations to this JSON file, which ui.perfetto.dev opens.
    """
    if step < 0:
        raise ValueError(f"--step is {step}; steps are counted from 0")
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise ValueError(f"--plot is {plot}; a file that ends in one of {', '.join(PICTURES)} is required")
    for flag, path in (("--plot", plot), ("--trace", trace)):
        require_writable(flag, path)
    planner = open_job(job, data)
    parsed = planner.job
    planned = planner.plan(step)
    summary = explain(parsed, planned)
    message = plan_message(parsed, planned, summary)
    rows = mean_ablation([ablation(parsed, planned)])
    if trace is not None:
        with writing("--trace", trace):
            write_trace(parsed, planned, summary.after, trace)
    if plot is not None:
        with writing("--plot", plot):
            if plot.suffix.lower() == ".html":
                write_page(parsed, planned, summary, rows, plot)
            else:
                draw_plan(summary, f"step {step} of job {parsed.job_id[:12]}, as simulated", plot, rows)
    if json:
        print(MessageToJson(message, preserving_proto_field_name=True), file=tells_on(trace))
    else:
        stderr = trace is not None and descriptor_of(trace) == STDOUT
        show_plan(console_for_tables(stderr=stderr), parsed.spec, message, rows, planner.num_steps)
