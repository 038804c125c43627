"""Refusal of jobs whose steps would be too large to plan, from the specification alone (`jobspec.PlanLimits`)."""

from collections.abc import Iterator

from dataserver.planning.job.fields import (
    PLAN_LIMITS,
    REMEDIES,
    SINGLE_STEP,
    Extreme,
    PlanLimits,
    most_forward_ns,
    most_units,
)
from dataserver.planning.job.spec import Execution, JobSpec

MAX_BUDGET_FITS = 2**28
"""Samples x sequences of a step whose sequences have a budget of items: each sample looks at all of them, twice with
balanced packing, which takes about ten seconds of one core."""
_COSTS = "lower the costs of its modules, or stream.global_batch"


class PlanLimitError(ValueError):
    """A job whose steps are beyond a limit of its plan version; the message names it."""


def limits_of(execution: Execution) -> PlanLimits:
    """The limits of the job's plan version."""
    return PLAN_LIMITS[execution.plan_version]


def check_step(spec: JobSpec) -> None:
    """Refuse a job whose steps are too large, or whose times could not be added.

    Raises:
        PlanLimitError: names the limit, both values, and what to change.
    """
    execution = spec.execution
    limits, layout = limits_of(execution), execution.layout
    for name, found in layout.step_size(spec.stream, execution).items():
        most = getattr(limits, name)
        if found > most:
            raise PlanLimitError(
                f"the job's {name} is {found:,}; plan_version {execution.plan_version} takes at most {most:,}: "
                f"{REMEDIES[name]}"
            )
    for extreme in (*_extremes(spec), *layout.extremes(spec.stream, execution)):
        if extreme.value > limits.integer:
            raise PlanLimitError(
                f"{extreme.what} could come to {extreme.value:.3e} in a step, beyond the integers of plan_version "
                f"{execution.plan_version}, which end at {limits.integer:.3e}: {extreme.remedy or _COSTS}"
            )


def check_contents(spec: JobSpec, samples: int, images: int) -> None:
    """Refuse a job whose steps have too many samples or images on average, which only its datasets tell.

    Raises:
        PlanLimitError: names the limit, both values, and what to change.
    """
    limits, stream = limits_of(spec.execution), spec.stream
    for name, found, most in (
        ("step_samples", samples, limits.step_samples),
        ("step_images", images, limits.step_images),
    ):
        if found > most:
            raise PlanLimitError(
                f"the job's {name} is about {found:,}, of global_batch {stream.global_batch} x seq_len "
                f"{stream.seq_len}; plan_version {spec.execution.plan_version} takes at most {most:,}: lower one of "
                "the two"
            )
    budgets = [most for most in stream.packing.budget if most is not None]
    if budgets:
        sequences = min(samples, max(stream.global_batch, images // min(budgets)))
        if samples * sequences > MAX_BUDGET_FITS:
            raise PlanLimitError(
                f"a step has about {samples:,} samples in {sequences:,} sequences, and with a budget of packing "
                f"(max_images, max_clips, max_videos) their product is at most {MAX_BUDGET_FITS:,}: lower "
                "stream.global_batch, raise the budget, or leave it out"
            )


def most_microbatches(execution: Execution) -> int:
    """Microbatches of each rank that a plan may have."""
    limits = limits_of(execution)
    return max(1, min(limits.step_microbatches, limits.step_operations // (2 * execution.layout.blocks(execution))))


def _extremes(spec: JobSpec) -> Iterator[Extreme]:
    """The largest sums and products of planning in any layout.

    A step has at most twice as many sequences as planned, all of them full.
    """
    stream, execution = spec.stream, spec.execution
    limits, layout = limits_of(execution), execution.layout
    sequences, waves = 2 * stream.global_batch, most_microbatches(execution)
    items = min(SINGLE_STEP * max(limits.step_samples, limits.step_images), sequences * (stream.seq_len // 3))
    ranks, total = max(m.dp for m in execution.modules), 0
    for module in execution.modules:
        name, base, percent = f"of module {module.name}", module.cost.microbatch_ns, 100 + module.cost.backward_percent
        step = most_forward_ns(stream, module, sequences)
        total += (step + waves * module.dp * base) * percent // 100
        yield Extreme(f"forward nanoseconds {name} x its backward_percent", (step + base) * percent)
        microbatch = most_forward_ns(stream, module, execution.microbatch) + base
        yield Extreme(f"nanoseconds of a microbatch {name} x backward_percent x ranks", microbatch * percent * ranks)
        # Loads are balanced in any order, so that each of the step's items is taken for the largest.
        number = sequences if module.holds_samples and not stream.packing.enabled else items
        yield Extreme(f"nanoseconds of a sequence {name} x items", 2 * most_forward_ns(stream, module, 1) * number)
        if module.memory is not None:
            units = max(most_units(stream, module, sequences), module.memory.units * module.dp)
            held = units * module.memory.unit_bytes * layout.num_chunks
            yield Extreme(f"bytes of activations {name}", held, "correct its memory.unit_bytes or memory.budget_bytes")
    for transfer in execution.transfers or ():
        ends = [execution.module(name) for name in (transfer.source, transfer.target)]
        rows = max(most_units(stream, module, execution.microbatch) for module in ends)
        total += limits.step_operations * (
            transfer.latency_ns + rows * transfer.row_bytes * 1000 // transfer.bytes_per_us
        )
        moved = sequences * stream.seq_len * 1000 * (transfer.row_bytes + transfer.bytes_per_us)
        yield Extreme(f"the rows of {transfer.name} x their bytes", moved, "lower its row_bytes or bytes_per_ns")
    yield Extreme("nanoseconds of all modules and transfers", total)
