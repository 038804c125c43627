"""Which entries of an ablation a plan is compared with, so that it is never slower than what is shown beside it."""

from collections.abc import Sequence

from dataserver.planning.job.fields import OrderPolicy, WaveOptions
from dataserver.planning.job.identity import Job
from dataserver.planning.job.spec import Execution
from dataserver.planning.layouts.shared.ablation import AblationEntry


def finalists(job: Job, entries: Sequence[AblationEntry]) -> tuple[AblationEntry, ...]:
    """The entries of an ablation that could be faster than the job's own candidates, each once.

    What an entry would need beyond the job's memory, or without its parity, is no finalist: entries are planned within
    both. Left out are those that differ from the job in the order of microbatches and in those in flight alone, since
    these are among the job's own candidates.
    """
    own, found = job.spec.execution, dict[str, AblationEntry]()
    for entry in entries:
        execution = constrained(own, entry.execution)
        differs = execution.modules != own.modules or _groups(execution) != _groups(own)
        if differs and all(execution != other.execution for other in found.values()):
            found[entry.name] = AblationEntry(entry.name, execution)
    return tuple(found.values())


def constrained(own: Execution, execution: Execution) -> Execution:
    """Give an execution the memory of the job's own modules, and its parity."""
    modules = tuple(
        m.model_copy(update={"memory": mine.memory}) for m, mine in zip(execution.modules, own.modules, strict=True)
    )
    return execution.model_copy(update={"modules": modules, "modality_parity": own.modality_parity})


def _groups(execution: Execution) -> object:
    """The layout's options, less order and what is in flight."""
    layout = execution.layout
    if not isinstance(layout, WaveOptions):
        return layout
    return layout.model_copy(update={"order": OrderPolicy.NONE, "extra_in_flight": None})
