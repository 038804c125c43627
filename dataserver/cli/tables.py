"""A plan as tables for people."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat
from typing import Final

from disttrain.v1 import plan_pb2
from rich import box
from rich.console import Console
from rich.table import Table

from dataserver.planning.job.fields import ModuleKind, Stream
from dataserver.planning.job.spec import Execution, JobSpec
from dataserver.planning.plan.expectation import imbalance
from dataserver.reporting.ablation import COLUMNS, TITLE, AblationRow

WIDTH: Final = 110
"""Width of tables, in characters, where the output is no terminal."""
MAX_SAMPLES_SHOWN: Final = 24
MAX_STAGES_SHOWN: Final = 8
CHOSEN_WIDTH: Final = 32


def console_for_tables(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal; where the output is none, as wide as the tables need."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(width=WIDTH, stderr=stderr)


def show_plan(
    console: Console, spec: JobSpec, message: plan_pb2.StepPlan, ablation: Iterable[AblationRow], num_steps: int
) -> None:
    """Print a plan of a job with that number of steps, and what each change on the way to it brings."""
    samples, execution = message.samples, spec.execution
    console.print(f"job {message.job_id}\nstream {message.stream_id}")
    console.print(
        f"step {message.step} of {num_steps}: {len(samples.sample)} samples, {sum(samples.images)} images, "
        f"{sum(samples.tokens)} tokens, {sum(samples.truncated_tokens)} cut; {execution.layout.kind} layout, "
        f"{message.num_microbatches} microbatches per rank"
    )
    if len(spec.stream.datasets) > 1:
        console.print(_mixture(spec.stream, message))
    console.print(_modules(execution, message))
    console.print(_step(message))
    console.print(ablation_table(ablation))
    if message.candidates:
        console.print(_candidates(message))
    if message.decisions:
        console.print(_decisions(message.decisions))
    if message.HasField("groups"):
        console.print(_groups(message))
    console.print(_samples(execution, message))
    if len(samples.sample) > MAX_SAMPLES_SHOWN:
        console.print(f"... and {len(samples.sample) - MAX_SAMPLES_SHOWN} more samples: --json has them all")


def compositions(microbatches: Iterable[int], degrees: Iterable[int]) -> Iterator[tuple[int, str]]:
    """For each microbatch the degrees of its groups: `<32, 8 x 4>` is one group of 32 ranks and four of 8.

    Args:
        microbatches: of each group, in order.
        degrees: of each group.
    """
    for microbatch, found in groupby(zip(microbatches, degrees, strict=True), key=lambda pair: pair[0]):
        counts = sorted(Counter(degree for _, degree in found).items(), reverse=True)
        text = ", ".join(f"{degree} x {count}" if count > 1 else str(degree) for degree, count in counts)
        yield microbatch, f"<{text}>"


def in_flight(stages: Sequence[int], chunks: int) -> str:
    """Microbatches in flight on the stages of a module; of a long pipeline the first and last ones.

    Stages of several model chunks count passes, each of a microbatch through one of them.
    """
    shown = [str(held) for held in stages]
    if len(shown) > MAX_STAGES_SHOWN:
        shown = [*shown[: MAX_STAGES_SHOWN - 2], "...", shown[-1]]
    return " ".join([*shown, *(["passes"] if chunks > 1 else [])])


def _table(title: str, *columns: str, numbers: Iterable[str] = ()) -> Table:
    """An empty table; the columns in `numbers` are set to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    right = set(numbers)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return table


def ablation_table(rows: Iterable[AblationRow]) -> Table:
    """Rows of an ablation."""
    table = _table(TITLE, *COLUMNS, numbers=COLUMNS[1:])
    for row in rows:
        table.add_row(*row.cells)
    return table


def _mixture(stream: Stream, message: plan_pb2.StepPlan) -> Table:
    """What the step has of each dataset."""
    numbers = ("set", "weight", "samples", "tokens")
    table = _table("datasets of the step", "set", "name", *numbers[1:], "epochs", numbers=numbers)
    samples = message.samples
    weights = zip(stream.datasets, stream.weights_at(message.step), strict=True)
    for number, (spec, weight) in enumerate(weights):
        of = [i for i, dataset in enumerate(samples.dataset) if dataset == number]
        epochs = [samples.epoch[i] for i in of]
        shown = "-" if not of else " to ".join(map(str, sorted({min(epochs), max(epochs)})))
        tokens = sum(samples.tokens[i] for i in of)
        table.add_row(str(number), spec.name, weight, str(len(of)), str(tokens), shown)
    return table


def _modules(execution: Execution, message: plan_pb2.StepPlan) -> Table:
    """Loads and what is in flight."""
    padded = any(m.padded for m in execution.modules)
    numbers = ["ranks", "stages", "largest ms\nbefore", "largest ms\nafter", "max / mean\nbefore", "max / mean\nafter"]
    numbers += ["padding\n%"] if padded else []
    table = _table("forward loads of the ranks, and microbatches in flight", "module", *numbers, "in flight",
                   numbers=numbers)  # fmt: skip
    for module, load, schedule in zip(execution.modules, message.loads, message.schedules, strict=True):
        loads = load.before_ns, load.after_ns
        table.add_row(
            module.name, str(module.dp), str(module.pp),
            *(f"{max(values) / 1e6:.1f}" for values in loads),
            *(f"{imbalance(values):.3f}" for values in loads),
            *([f"{load.padding_ppm / 1e4:.1f}"] if padded else []),
            in_flight(schedule.in_flight, schedule.chunks),
        )  # fmt: skip
    return table


def _step(message: plan_pb2.StepPlan) -> Table:
    table = _table("simulated step", "", "before", "after", numbers=("before", "after"))
    makespans = message.makespan_before_ns, message.makespan_after_ns
    table.add_row("makespan ms", *(f"{ns / 1e6:.3f}" for ns in makespans))
    bound = message.lower_bound_ns
    table.add_row("above lower bound %", *(f"{100 * (ns - bound) / bound:.1f}" if bound else "-" for ns in makespans))
    table.add_row("bubble %", f"{message.bubble_before_ppm / 1e4:.2f}", f"{message.bubble_after_ppm / 1e4:.2f}")
    return table


def _candidates(message: plan_pb2.StepPlan) -> Table:
    table = _table("plans compared, the first was chosen", "plan", "makespan ms", "slower %",
                   numbers=("makespan ms", "slower %"))  # fmt: skip
    fastest = message.candidates[0].makespan_ns
    for candidate in message.candidates:
        slower = 100 * (candidate.makespan_ns - fastest) / fastest if fastest else 0.0
        table.add_row(candidate.name, f"{candidate.makespan_ns / 1e6:.3f}", f"{slower:.2f}")
    return table


def _decisions(decisions: Iterable[plan_pb2.Decision]) -> Table:
    table = Table("about", title="decisions", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("chosen", max_width=CHOSEN_WIDTH, overflow="fold")
    table.add_column("why", overflow="fold")
    for decision in decisions:
        table.add_row(decision.subject, decision.chosen, decision.reason)
    return table


def _groups(message: plan_pb2.StepPlan) -> Table:
    arrangement = _arrangement(message, message.groups.module)
    tokens: Counter[int] = Counter()
    sequences: dict[int, set[tuple[int, int]]] = {}
    columns = arrangement.item, arrangement.rank, arrangement.microbatch, arrangement.slot
    for item, rank, microbatch, slot in zip(*columns, strict=True):
        tokens[microbatch] += message.samples.tokens[item]
        sequences.setdefault(microbatch, set()).add((rank, slot))
    numbers = ("microbatch", "sequences", "tokens")
    table = _table("sequence-parallel groups", "microbatch", "ranks of the groups",
                   "sequences", "tokens", numbers=numbers)  # fmt: skip
    for microbatch, composition in compositions(message.groups.microbatch, message.groups.degree):
        held = len(sequences.get(microbatch, ()))
        table.add_row(str(microbatch), composition, str(held), str(tokens[microbatch]))
    return table


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a module holds the samples: what is written for each of them, by column."""

    columns: tuple[str, ...]
    cells: Mapping[int, tuple[str, ...]]


def _samples(execution: Execution, message: plan_pb2.StepPlan) -> Table:
    samples = message.samples
    places = _places(execution, message)
    about = ("set", "epoch", "shard", "row", *(("part",) if samples.part else ()))
    sizes = ("tokens", "cut", "images")
    where = [column for place in places for column in place.columns]
    table = _table("samples in canonical order", *about, "task", *sizes, *where, numbers=(*about, *sizes, *where))
    for i in range(min(len(samples.sample), MAX_SAMPLES_SHOWN)):
        shard, row = divmod(samples.sample[i], 1 << 32)
        task = plan_pb2.Task.Name(samples.task[i]).removeprefix("TASK_").lower()
        table.add_row(
            str(samples.dataset[i]), str(samples.epoch[i]), str(shard), str(row), *map(str, samples.part[i : i + 1]),
            task,
            str(samples.tokens[i]), str(samples.truncated_tokens[i]), str(samples.images[i]),
            *(cell for place in places for cell in place.cells.get(i, repeat("-", len(place.columns)))),
        )  # fmt: skip
    return table


def _places(execution: Execution, message: plan_pb2.StepPlan) -> list[_Places]:
    """Ranks of samples in the modules that hold every sample: the backbone, or each tower."""
    samples = message.samples.images
    sample_of_image = [i for i, count in enumerate(samples) for _ in range(count)]
    groups, found = message.groups, []
    degrees = {
        (groups.module, microbatch, rank): degree
        for microbatch, rank, degree in zip(groups.microbatch, groups.first_rank, groups.degree, strict=True)
    }
    for module in execution.modules:
        if module.kind not in (ModuleKind.BACKBONE, ModuleKind.TOWER):
            continue
        placed, cells = _arrangement(message, module.name), {}
        for item, rank, microbatch, slot in zip(placed.item, placed.rank, placed.microbatch, placed.slot, strict=True):
            last = rank + degrees.get((module.name, microbatch, rank), 1) - 1
            sample = item if module.holds_samples else sample_of_image[item]
            cells[sample] = (f"{rank}-{last}" if last > rank else str(rank), str(microbatch), str(slot))
        found.append(_Places((f"{module.name}\nrank", "micro-\nbatch", "slot"), cells))
    return found


def _arrangement(message: plan_pb2.StepPlan, module: str) -> plan_pb2.ModuleArrangement:
    return next(a for a in message.arrangements if a.module == module)
