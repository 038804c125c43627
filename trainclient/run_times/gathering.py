"""The report of a run, from what all processes have counted."""

import json
import sys

from dataserver.process import in_one_line
from trainclient.client import DataClient
from trainclient.exchange.gathering import gather_texts
from trainclient.exchange.lost_ranks import translate_rank_errors
from trainclient.run_times.remedies import RunFacts
from trainclient.run_times.report import RunReport
from trainclient.run_times.spent import ProcessTimes, RunTimes
from trainclient.stream.errors import ClientError
from trainclient.timeline.tracks import PlannedOperations
from trainclient.topology.process_grid import Topology
from trainclient.topology.process_groups import Groups
from trainclient.training.config import TrainConfig
from trainclient.training.model_config import Sharding
from trainclient.training.models import Models


def report_run(
    times: RunTimes, config: TrainConfig, groups: Groups, client: DataClient, steps: range
) -> RunReport | None:
    """Bring together where the time of a run went; all call this together.

    Only the first process gets a report, if there was any step.

    Args:
        times: of this process.
        config: of the run.
        groups: this process and the others.
        client: of any views of the job.
        steps: what was run.

    Raises:
        RankLostError: another process is gone.
    """
    processes = gather(times.own, groups) if steps else []
    if not processes:
        return None
    models = Models.of(config, client.job.spec)
    run = RunFacts(
        config=config,
        processes=processes,
        first=steps.start,
        end=steps.stop,
        step_s=times.step_s,
        waits_s=times.waits_s,
        planned_ns=planned_ns(client, times.topology, steps[-1]),
        num_servers=len(client.fleet.addresses),
        server=client.fleet.endpoints[client.fleet.current].address,
        zero3=[m.name for m in models.job.execution.modules if models.sharding(m) is Sharding.ZERO3],
    )
    return RunReport.of(run)


def planned_ns(client: DataClient, topology: Topology, step: int) -> list[int]:
    """What each process was to compute in a step, by global rank; none if no server says so."""
    try:
        planned = PlannedOperations(client.get_plan(step, with_timelines=True))
    except ClientError as error:
        sys.stderr.write(f"no remedy looks at costs: the plan of step {step} is not known ({in_one_line(error)})\n")
        return []
    found = (planned.of(process) for process in topology.processes)
    return [int((end_ns - start_ns).sum()) for _, start_ns, end_ns in found]


def gather(own: ProcessTimes, groups: Groups) -> list[ProcessTimes]:
    """The times of all processes, by global rank; none but on the first one. All call this together.

    Raises:
        RankLostError: another process is gone.
    """
    with translate_rank_errors("other ranks"):
        found = gather_texts(json.dumps(own.as_dict()), groups.control)
    return [ProcessTimes.of(json.loads(text)) for text in found]
