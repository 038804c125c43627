"""`dataserver fit`.

The times that a server holds are gone with it; this keeps them, one JSON object a line, for `--times`:

    python -c 'import grpc, sys
    from disttrain.v1 import data_service_pb2 as pb, data_service_pb2_grpc as rpc
    from google.protobuf.json_format import MessageToJson
    stub = rpc.DataServiceStub(grpc.insecure_channel(sys.argv[1]))
    for times in stub.ListStepTimes(pb.ListStepTimesRequest(job_id=sys.argv[2])).times:
        print(MessageToJson(times, indent=None))' HOST:PORT JOB_ID >> times.jsonl
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import grpc
import numpy as np
import yaml
from disttrain.v1.data_service_pb2 import ListStepTimesRequest, StepTimes
from disttrain.v1.data_service_pb2_grpc import DataServiceStub
from google.protobuf.json_format import Parse, ParseError
from rich import box
from rich.console import Console
from rich.table import Table

from dataserver.cli.arguments import Address, MaybePath, ServerCredentials
from dataserver.cli.jobs import NO_DATA, Data, open_job
from dataserver.cli.progress import progress_bar
from dataserver.jobs import JobPlanner
from dataserver.planning import I64
from dataserver.planning.fitting import (
    MAX_TIME_NS,
    Fit,
    FitError,
    TimingSamples,
    fit,
    microbatch_sizes,
)
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.plan.plan import StepPlan
from dataserver.security import NO_CREDENTIALS, Channels, Credentials, tls_problem

MAX_LINE_BYTES: Final = 4 << 20
MAX_REPORTS: Final = 1 << 16
TIMEOUT_S: Final = 30.0

Key = tuple[int, int, int]
"""Step, data-parallel rank, pipeline stage."""


def fit_costs(
    job: Path,
    times: MaybePath = None,
    server: Address = None,
    first_step: int = 0,
    data: Data = NO_DATA,
    credentials: ServerCredentials = NO_CREDENTIALS,
) -> None:
    """Fit the costs of the modules to the step times of a job, for the next job.

    It makes the plans of the reported steps again, to know what each microbatch held, and reads no image. It prints
    what it found, and the YAML to put into the next job. A running job keeps its costs, because they are part of its
    identity.

    A file for --times has one report per line, as JSON with the fields of disttrain.v1.StepTimes.

    Args:
        job: YAML or JSON file of the job that was measured.
        times: File of step times; give this or --server.
        server: A server that received the reports of the job.
        first_step: Leave out the steps before this one, because the run was still warming up.
        data: Datasets and tokenizers.
        credentials: What to show --server.
    """
    if (times is None) == (server is None):
        raise ValueError("exactly one of --times and --server is required: a file of step times, or who has them")
    planner = open_job(job, data)
    reports = list(
        read_times(times) if times is not None else fetch_times(server or "", planner.job.job_id, credentials)
    )
    measured = measurements(planner, [r for r in reports if r.step >= first_step])
    _show(Console(), planner.job.spec.execution.modules, measured)


def read_times(file: Path) -> Iterator[StepTimes]:
    """The reports in a file of JSON lines, oldest first.

    Raises:
        ValueError: the file cannot be read, or a line is no report; names the line.
    """
    try:
        with file.open("rb") as lines:
            for number in range(1, MAX_REPORTS + 2):
                line = lines.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES or number > MAX_REPORTS:
                    raise ValueError(
                        f"{file}, line {number}: at most {MAX_REPORTS} lines of {MAX_LINE_BYTES} bytes are read"
                    )
                if line.strip():
                    yield _report(line, f"{file}, line {number}")
    except OSError as error:
        raise ValueError(f"the times {file} cannot be read: {error.strerror}") from None


def _report(line: bytes, where: str) -> StepTimes:
    try:
        return Parse(line, StepTimes())
    except (ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: no StepTimes in JSON: {error}") from None


def fetch_times(server: str, job_id: str, credentials: Credentials = NO_CREDENTIALS) -> Iterable[StepTimes]:
    """The reports that a server holds, oldest first.

    Raises:
        ValueError: it cannot be reached, or does not know the job.
    """
    with Channels(credentials).open(server) as channel:
        try:
            answer = DataServiceStub(channel).ListStepTimes(ListStepTimesRequest(job_id=job_id), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise ValueError(
                f"server {server} lists no step times: {tls_problem(error.details() or '') or error.details()}"
            ) from None
    return answer.times


def measurements(planner: JobPlanner, reports: Iterable[StepTimes]) -> dict[str, TimingSamples]:
    """What was measured of each module that has reports, for each microbatch whose stages all reported it.

    A later report of the same step, rank and stage replaces an earlier one (a step that was run again).

    Raises:
        ValueError: a report belongs to another job, or to no rank, step or microbatch of this one.
    """
    found: dict[str, dict[Key, StepTimes]] = {}
    for report in reports:
        _check(planner, report)
        found.setdefault(report.module, {})[report.step, report.rank, report.stage] = report
    if not found:
        raise ValueError("there are no step times; let the trainer report some, or lower --first-step")
    steps = sorted({step for keys in found.values() for step, _, _ in keys})
    collected: dict[str, list[I64]] = {}
    with progress_bar("planning steps") as progress:
        for done, step in enumerate(steps, 1):
            plan = planner.plan(step)
            for name, taken in found.items():
                module = planner.job.spec.execution.module(name)
                collected.setdefault(name, []).extend(_microbatches(plan, module, taken))
            progress(done, len(steps))
    return {name: TimingSamples(*np.concatenate([np.empty((5, 0), np.int64), *c], axis=1))
            for name, c in collected.items()}  # fmt: skip


def _check(planner: JobPlanner, report: StepTimes) -> None:
    job = planner.job
    if report.job_id != job.job_id:
        raise ValueError(
            f"found times of job {report.job_id[:64]!r}; the job file, with these datasets, is {job.job_id}: its own "
            "times are required"
        )
    module = job.spec.execution.module(report.module)
    for what, value, limit in (
        ("step", report.step, planner.num_steps),
        ("rank", report.rank, module.dp),
        ("stage", report.stage, module.pp),
    ):
        if value >= limit:
            raise ValueError(f"found times of {what} {value} of module {module.name}; it has {limit}")
    if any(not 0 <= ns <= MAX_TIME_NS for ns in (*report.forward_ns, *report.backward_ns)):
        raise ValueError(f"found a time of step {report.step} that is not between 0 and {MAX_TIME_NS} ns")


def _microbatches(plan: StepPlan, module: ModuleSpec, taken: dict[Key, StepTimes]) -> list[I64]:
    """For each rank whose stages all reported the step: int64 [5, microbatches], the fields of `TimingSamples`."""
    sizes = np.stack(microbatch_sizes(plan, module))
    found = []
    for rank in range(module.dp):
        reports = [taken.get((plan.step, rank, stage)) for stage in range(module.pp)]
        times = [_times(plan, report, module) for report in reports if report is not None]
        if len(times) == module.pp:
            found.append(np.concatenate([sizes[:, rank], np.sum(times, axis=0)]))
    return found


def _times(plan: StepPlan, report: StepTimes, module: ModuleSpec) -> I64:
    """int64 [2, microbatches]: forward and backward, which takes no time where none is run."""
    forward = list(report.forward_ns)
    backward = list(report.backward_ns) if module.runs_backward else [0] * len(forward)
    for what, values in (("forward", forward), ("backward", backward)):
        if len(values) != plan.num_microbatches:
            raise ValueError(
                f"module {report.module}, rank {report.rank}, stage {report.stage} reported {len(values)} {what} times "
                f"of step {report.step}; one for each of its {plan.num_microbatches} microbatches is required"
            )
    return np.array([forward, backward], np.int64)


def _show(console: Console, modules: Iterable[ModuleSpec], measured: dict[str, TimingSamples]) -> None:
    """Print the costs; ValueError, after the others are printed, for the modules that cannot be fitted."""
    fits: dict[str, Fit] = {}
    refused: list[str] = []
    for module in modules:
        if module.name not in measured:
            continue
        try:
            if not len(measured[module.name].count):
                raise FitError(f"no step was reported by all {module.pp} stages of a rank")
            fits[module.name] = fit(measured[module.name])
        except FitError as error:
            refused.append(f"module {module.name}: {error}")
    if fits:
        console.print(_table(fits))
        snippet = [{"name": name, "cost": found.cost.model_dump(mode="json")} for name, found in fits.items()]
        print("# For the next job: the cost of each of these modules.")
        print(yaml.safe_dump({"execution": {"modules": snippet}}, sort_keys=False), end="")
    if refused:
        raise ValueError("; ".join(refused))


def _table(fits: dict[str, Fit]) -> Table:
    names = ("module", "mb", "out", "const us", "each ns", "pair ps", "bwd %", "R2", "p50 %", "p90 %")
    title = (
        "costs that explain the measured times (mb: microbatches; out: others, slowed down by something "
        "else than their size; p50, p90: errors of half and of nine tenths of them, at most; R2: share of the "
        "differences between times that sizes explain, low where all are alike, however small the errors)"
    )
    table = Table(*names, title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name, found in fits.items():
        cost = found.cost
        table.add_row(
            name, str(found.num_microbatches), str(found.num_outliers), f"{cost.microbatch_ns / 1e3:.1f}",
            f"{cost.linear_ps / 1e3:.1f}", f"{cost.quadratic_fs / 1e3:.1f}", str(cost.backward_percent),
            f"{found.r2_ppm / 1e6:.4f}", f"{found.residual_p50_ppm / 1e4:.1f}", f"{found.residual_p90_ppm / 1e4:.1f}",
        )  # fmt: skip
    return table
