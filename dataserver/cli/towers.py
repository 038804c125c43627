"""`dataserver towers`: chooses the degrees of contrastive towers."""

import json as json_format
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import tyro
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from dataserver.cli.arguments import Switch
from dataserver.cli.jobs import NO_DATA, Data, open_job
from dataserver.cli.progress import progress_bar
from dataserver.cli.tables import console_for_tables
from dataserver.jobs import JobPlanner
from dataserver.planning.job.fields import ModuleSpec
from dataserver.planning.job.identity import identify
from dataserver.planning.layouts.contrastive.choice import (
    TowerChoice,
    TowerCluster,
    TowerPlacement,
    TowerPlan,
    TowerProfile,
    choose_towers,
    devices_in_parallel,
    devices_shared_equally,
    share_time,
)
from dataserver.planning.layouts.contrastive.options import ContrastiveOptions
from dataserver.planning.layouts.contrastive.profiles import tower_profile, with_degrees
from dataserver.planning.plan.expectation import item_sizes
from dataserver.planning.planner import plan_step, timeline

StateBytes = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=BYTES", help_behavior_hint="")
]
PLACES: Final = {"parallel": devices_in_parallel, "shared": share_time, "equal": devices_shared_equally}
"""Towers on devices of their own; all towers on all devices, one after the other; the same degrees for all towers."""


@dataclass(frozen=True, slots=True)
class _Found:
    """One way to place the towers."""

    plan: TowerPlan
    simulated_ns: int | None
    """Mean time of a step as it would be planned; None where jobs cannot place towers so."""


def towers(
    job: Path,
    devices: int,
    devices_per_node: int,
    device_bytes: int,
    state_bytes: StateBytes = (),
    steps: int = 20,
    data: Data = NO_DATA,
    json: Switch = False,
) -> None:
    """Choose replicas and tensor parallelism of each tower of a contrastive job for a number of devices.

    It uses the job's costs and the sizes of its samples (DISTMM, section 4.2). A light tower with fewer replicas and
    more samples on each uses its devices better, and ends together with the heavy one. It prints what it found, and the
    YAML of the modules. It assumes that tensor parallelism costs no communication, so tensor parallelism is chosen only
    if memory requires it. Pipeline stages are not chosen. It needs no server and reads no image.

    Args:
        job: YAML or JSON file of the job.
        devices: Devices for all towers together.
        devices_per_node: Number of devices per node; tensor parallelism stays within a node.
        device_bytes: Memory of a device.
        state_bytes: Parameters, gradients and optimizer states of a whole tower, as NAME=BYTES; may be repeated.
        steps: Steps whose samples represent all; fewer if the job ends earlier.
        data: Datasets and tokenizers.
        json: Print what was found as JSON.
    """
    if min(devices, devices_per_node, device_bytes, steps) < 1:
        raise ValueError(
            f"--devices is {devices}, --devices-per-node {devices_per_node}, --device-bytes {device_bytes}, --steps "
            f"{steps}; at least 1 of each is required"
        )
    planner = open_job(job, data)
    study = _Study(planner, TowerCluster(devices, devices_per_node, device_bytes), state_bytes, steps)
    if json:
        print(json_format.dumps(study.as_json(), indent=1))
    else:
        study.show(console_for_tables())


class _Study:
    """The towers of a job on a cluster, and how they could be placed.

    Raises:
        ValueError: the job is not contrastive, or its towers neither fit devices of their own nor all devices in turn.
    """

    def __init__(self, planner: JobPlanner, cluster: TowerCluster, state_bytes: Sequence[str], steps: int) -> None:
        execution = planner.job.spec.execution
        try:
            options = execution.options(ContrastiveOptions)
        except TypeError:
            kind = execution.layout.kind
            raise ValueError(f"the job has a {kind} layout; one with a contrastive layout is required") from None
        self._job, self._cluster = planner.job, cluster
        self._towers, self._count = execution.modules, options.microbatches
        self._batch = planner.job.stream.contrastive_batch or 1
        self._states = _bytes_of(state_bytes, [t.name for t in self._towers])
        first = planner.first_step
        self._samples = [planner.samples(step) for step in range(first, min(first + steps, planner.num_steps))]
        profiles = [self._profile(tower) for tower in self._towers]
        self._fastest = choose_towers(profiles, cluster, self._batch, self._count).placement
        self._found: dict[str, _Found] = {}
        self._refused: dict[str, str] = {}
        with progress_bar("simulating") as progress:
            for number, (name, place) in enumerate(PLACES.items(), 1):
                try:
                    plan = place(profiles, cluster, self._batch, self._count)
                    self._found[name] = _Found(plan, None if name == "shared" else self._simulated_ns(plan))
                except ValueError as error:
                    self._refused[name] = str(error)
                progress(number, len(PLACES))

    def _profile(self, tower: ModuleSpec) -> TowerProfile:
        sizes = np.concatenate([item_sizes(tower, samples) for samples in self._samples])
        return tower_profile(tower, sizes, self._batch, self._count, self._states.get(tower.name, 0), self._cluster)

    def _modules(self, plan: TowerPlan) -> tuple[ModuleSpec, ...]:
        """The towers of the job with the degrees of a plan."""
        pairs = zip(self._towers, plan.towers, strict=True)
        return tuple(with_degrees(t, c.tp, c.replicas, self._free_bytes(t, c)) for t, c in pairs)

    def _free_bytes(self, tower: ModuleSpec, choice: TowerChoice) -> int:
        states = -(-self._states.get(tower.name, 0) // choice.tp)
        return self._cluster.device_bytes - states

    def _simulated_ns(self, plan: TowerPlan) -> int:
        """Mean of the steps, as they would be planned."""
        execution = self._job.spec.execution.model_copy(update={"modules": self._modules(plan)})
        job = identify(self._job.spec.model_copy(update={"execution": execution}))
        times = [timeline(job.spec, plan_step(job, n, s)).makespan_ns for n, s in enumerate(self._samples)]
        return sum(times) // len(times)

    def _unstated(self) -> dict[str, list[str]]:
        """Towers whose memory counts as 0, and which part of it."""
        return {
            "states": [t.name for t in self._towers if t.name not in self._states],
            "activations": [t.name for t in self._towers if t.memory is None],
        }

    def _advice(self) -> list[dict[str, Any]]:
        """The modules of towers on devices of their own, as a job file has them; none if they do not fit.

        Costs are numbers: the names that they came from are not kept.
        """
        if "parallel" not in self._found:
            return []
        modules = self._modules(self._found["parallel"].plan)
        return [module.model_dump(mode="json", exclude_defaults=True) for module in modules]

    def as_json(self) -> dict[str, Any]:
        """What was found, for programs."""
        return {
            "job_id": self._job.job_id,
            "contrastive_batch": self._batch,
            "cluster": asdict(self._cluster),
            "steps": len(self._samples),
            "samples": sum(len(samples) for samples in self._samples),
            "mean_sizes": {t.name: self._mean_size(t) for t in self._towers},
            "not_counted": self._unstated(),
            "placements": {
                name: {
                    "batch_ns": entry.plan.step_ns,
                    "simulated_step_ns": entry.simulated_ns,
                    "towers": [self._choice(choice) for choice in entry.plan.towers],
                }
                for name, entry in self._found.items()
            },
            "fastest": self._fastest.value,
            "refused": self._refused,
            "modules": self._advice(),
        }

    def _choice(self, choice: TowerChoice) -> dict[str, Any]:
        return {**asdict(choice), "devices": choice.devices}

    def _mean_size(self, tower: ModuleSpec) -> float:
        return float(np.concatenate([item_sizes(tower, samples) for samples in self._samples]).mean())

    def show(self, console: Console) -> None:
        """Print it for people.

        Raises:
            ValueError: after the rest is printed, if the towers cannot have devices of their own.
        """
        sizes = ", ".join(f"{t.name} {self._mean_size(t):.0f}" for t in self._towers)
        console.print(
            f"contrastive batches of {self._batch} on {self._cluster.num_devices} devices; mean size in "
            f"{sum(map(len, self._samples))} samples: {sizes}"
        )
        console.print(self._table())
        for name, reason in self._refused.items():
            console.print(f"{name} does not fit: {reason}")
        for part, names in self._unstated().items():
            where = "--state-bytes NAME=BYTES" if part == "states" else "memory.unit_bytes in the job"
            if names:
                console.print(f"{part} of {', '.join(names)} are not counted in memory: {where} states them")
        self._say_gain(console)
        modules = self._advice()
        if not modules:
            raise ValueError(f"towers of a job have devices of their own: {self._refused['parallel']}")
        print("# The towers on devices of their own, for the job.")
        print(yaml.safe_dump({"execution": {"modules": modules}}, sort_keys=False), end="")

    def _table(self) -> Table:
        table = Table(title="ways to place the towers", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
        for column in ("placement", "tower"):
            table.add_column(column)
        for column in ("tp", "replicas", "devices", "samples\nof each", "batch ms", "device\nGB", "step ms\nsimulated"):
            table.add_column(column, justify="right")
        for name, entry in self._found.items():
            for number, choice in enumerate(entry.plan.towers):
                table.add_row(
                    "" if number else name, choice.name, str(choice.tp), str(choice.replicas), str(choice.devices),
                    str(choice.batch), f"{choice.step_ns / 1e6:.2f}", f"{choice.device_bytes / 1e9:.2f}",
                )  # fmt: skip
            simulated = "-" if entry.simulated_ns is None else f"{entry.simulated_ns / 1e6:.2f}"
            join = max if entry.plan.placement is TowerPlacement.SHARED else sum
            used = join(choice.devices for choice in entry.plan.towers)
            table.add_row(
                "", "all", "", "", str(used), "", f"{entry.plan.step_ns / 1e6:.2f}", "", simulated,
                style="bold", end_section=True,
            )  # fmt: skip
        return table

    def _say_gain(self, console: Console) -> None:
        console.print("parallel: each tower on devices of its own; shared: all towers on all devices, one after the")
        console.print("other, which no job plans; equal: devices of their own, the same degrees for all towers")
        ours, equal = (
            self._found[name].simulated_ns if name in self._found else None for name in ("parallel", "equal")
        )
        if ours and equal:
            console.print(f"parallel is {equal / ours:.2f} times as fast as equal, as simulated")
        console.print(f"fastest by the mean sizes: {self._fastest}")


def _bytes_of(entries: Iterable[str], towers: Sequence[str]) -> dict[str, int]:
    """The NAME=BYTES entries of --state-bytes.

    Raises:
        ValueError: an entry is not of that form, or names no tower, or one that was named before.
    """
    found: dict[str, int] = {}
    for entry in entries:
        name, _, number = entry.partition("=")
        if name not in towers or name in found or not number.isdecimal():
            raise ValueError(f"--state-bytes {entry}: NAME=BYTES is required, each tower of {list(towers)} once")
        found[name] = int(number)
    return found
