"""Costs that were measured on a device: the file that `trainclient profile` writes, and planner and solver read.

In a job's file a module names it instead of numbers: `cost: {profile: profile.yaml}`. Who reads the job's file puts
the numbers there (`with_profiles`), so that what travels, and is identified, holds numbers alone.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from dataserver.planning.job.fields import (
    REDUCTION_NS,
    Cost,
    DecimalString,
    Modality,
    ModelSize,
    ModuleKind,
    ModuleSpec,
    SpecModel,
    gradient_passes,
    peer_sums,
)


class ProfileError(ValueError):
    """A profile that cannot be read, or lacks what is asked of it."""


def _with_rows(size: ModelSize) -> ModelSize:
    if min(size.layers, size.width) < 1:
        raise ValueError(f"layers are {size.layers} and width is {size.width}; at least 1 of each is required")
    return size


def _some(speed: str) -> str:
    if Fraction(speed) < Fraction(1, 1000):
        raise ValueError(f"it is {speed}; at least 0.001 is required")
    return speed


class ProfiledCost(SpecModel):
    """A module at one degree."""

    tp: int = Field(ge=1)
    """Devices that share its layers; of these one was measured, without the sums over its peers."""
    cost: Cost
    """Cost of the whole module when trained; `backward_percent` is the measured one."""
    error_percent: float
    """Median of how far times are from the cost."""


class ProfiledModule(SpecModel):
    """A module as it was measured."""

    name: str
    """Its kind; of a tower its modality."""
    size: Annotated[ModelSize, AfterValidator(_with_rows)]
    degrees: tuple[ProfiledCost, ...] = Field(min_length=1)


class Profile(SpecModel):
    """What was measured on one device."""

    gpu: str
    """Kind of GPU, or what the device is called if it is of no known kind."""
    device: str
    """Name that the device's driver gives it."""
    dtype: str
    within_gb_s: Annotated[DecimalString, AfterValidator(_some)] | None = None
    """10^9 bytes a second that it sends to others of its node, where tensor-parallel peers add up what they have; that
    of its kind, unless somebody has measured it."""
    modules: tuple[ProfiledModule, ...]


def parse_profile(data: Any, where: str) -> Profile:
    """A profile from the values of its YAML, which came from `where`.

    Raises:
        ProfileError: it is none.
    """
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise ProfileError(f"{where} is no profile ({problems}); `trainclient profile` writes one") from None


def with_gradients(cost: Cost, passes: int) -> Cost:
    """The cost of a module whose backward computes `passes` of two gradients: of its inputs, and of its weights."""
    return cost.model_copy(update={"backward_percent": round(Fraction(cost.backward_percent * passes, 2))})


def with_sums(cost: Cost, kind: str, size: ModelSize, tp: int, bytes_per_ns: Fraction) -> Cost:
    """A cost with the sums over tensor-parallel peers, in rings and not overlapped (Megatron-LM, arXiv 1909.08053).

    Args:
        cost: of a module on `tp` devices.
        kind: of the module.
        size: of its model.
        tp: the peers.
        bytes_per_ns: what each of them sends to the next.

    Raises:
        ValueError: they take longer than a job can say.
    """
    if tp == 1:
        return cost
    sums, percent = peer_sums(kind, size), cost.backward_percent
    row_ps = Fraction(4_000 * sums * size.width * (tp - 1), tp * bytes_per_ns)  # bfloat16, there and back
    linear = cost.linear_ps + row_ps
    backward = Fraction(cost.linear_ps * percent, 100) + (row_ps if percent else 0)
    try:
        return Cost(
            microbatch_ns=cost.microbatch_ns + sums * REDUCTION_NS,
            linear_ps=round(linear),
            quadratic_fs=cost.quadratic_fs,
            window=cost.window,
            backward_percent=round(Fraction(100 * backward, linear)),
        )
    except ValidationError:
        raise ValueError(
            f"with sums over {tp} peers the {kind} of width {size.width} takes {round(linear)} ps a row, longer than "
            "a job can say; check the bandwidth within a node, which is given in 10^9 bytes a second"
        ) from None


def measured_name(module: ModuleSpec) -> str:
    """What a profile calls a module of a job: towers by what they read, encoders of clips and videos by both."""
    if module.kind is ModuleKind.TOWER:
        return str(module.reads)
    return str(module.kind) if module.modality in (None, Modality.IMAGE) else f"{module.modality}-{module.kind}"


def cost_of(profile: Profile, module: ModuleSpec, modules: Sequence[ModuleSpec]) -> Cost:
    """What a module of a job costs as it is run beside `modules`, itself among them.

    Raises:
        ProfileError: the profile does not have it, or not at its degree; says what it has.
    """
    name = measured_name(module)
    measured = next((m for m in profile.modules if m.name == name), None)
    if measured is None:
        raise ProfileError(f"the profile has no module {name}, only {[m.name for m in profile.modules]}; measure it")
    degrees = {d.tp: d.cost for d in measured.degrees}
    if module.sp > 1:
        raise ProfileError(f"module {module.name} has sp {module.sp}, and profiles none; give its cost in numbers")
    if module.tp not in degrees:
        raise ProfileError(
            f"the profile has {name} at tp {sorted(degrees)}, and module {module.name} has tp {module.tp}; measure it "
            f"with --tp 1 {module.tp}"
        )
    if module.tp > 1 and profile.within_gb_s is None:
        raise ProfileError(
            f"the profile has no within_gb_s, on which the sums over the {module.tp} peers of {name} depend; write "
            "into it how many 10^9 bytes a second its device sends to others of its node"
        )
    cost = with_gradients(degrees[module.tp], gradient_passes(module, modules))
    summed = with_sums(cost, module.kind, measured.size, module.tp, Fraction(profile.within_gb_s or "1"))
    again = 100 if module.recompute else 0
    return summed.model_copy(update={"backward_percent": summed.backward_percent + again})


def with_profiles(job: Any, read: Callable[[str], Any]) -> Any:
    """A job as people write it, with numbers where the cost of a module names a profile.

    Args:
        job: the values of its YAML or JSON. What does not look like a job is passed over, for `parse_job` to refuse.
        read: the values of a file, by the name that it has in the job.

    Raises:
        ProfileError: a profile cannot be used for its module; names both.
    """
    execution = job.get("execution") if isinstance(job, Mapping) else None
    modules = execution.get("modules") if isinstance(execution, Mapping) else None
    entries = modules if isinstance(modules, list) else []
    named = {number for number, entry in enumerate(entries) if "profile" in _cost(entry)}
    if not named:
        return job
    bare = [{k: v for k, v in m.items() if k != "cost"} if n in named else m for n, m in enumerate(entries)]
    try:
        specs = [ModuleSpec.model_validate_json(json.dumps(entry), strict=True) for entry in bare]
    except (TypeError, ValueError):  # something else is wrong, and will be named
        filled = bare
    else:
        filled = [
            {**entry, "cost": _numbers(f"execution.modules.{n}.cost", _cost(entries[n]), specs[n], specs, read)}
            if n in named
            else entry
            for n, entry in enumerate(bare)
        ]
    return {**job, "execution": {**job["execution"], "modules": filled}}


def _cost(entry: Any) -> Mapping[str, Any]:
    """What a module's entry says of its cost, as far as it says anything in fields."""
    found = entry.get("cost") if isinstance(entry, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _numbers(
    place: str, given: Mapping[str, Any], module: ModuleSpec, modules: Sequence[ModuleSpec], read: Callable[[str], Any]
) -> dict[str, int]:
    name = given["profile"]
    if len(given) > 1 or not isinstance(name, str):
        raise ProfileError(
            f"{place} has {sorted(given)}, and profile is {name!r:.80}; the name of a file alone is required"
        )
    profile = parse_profile(read(name), f"{place}: {name}")
    try:
        return cost_of(profile, module, modules).model_dump()
    except ValueError as error:
        raise ProfileError(f"{place}: {name}: {error}") from None
