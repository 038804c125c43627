"""What a run that resumes updates otherwise than the run that wrote its checkpoint: rates, and which modules.

Nothing of it is read back. A checkpoint holds moments and counts of updates alone, so that the configuration decides
every rate from the first step after it; what is saved here says what differs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from trainclient.checkpoint.state import TrainerState
from trainclient.training.freezing import TOWER_FROZEN, training_of
from trainclient.training.optimizer_config import Course, OptimizerConfig
from trainclient.training.schedule import PROJECTOR, ModuleRates, Schedule

FOR_ALL = ("beta1", "beta2", "epsilon", "clip")
"""Options of the optimizer that no module has of its own."""


def update_settings(config: OptimizerConfig, rates: Mapping[str, ModuleRates]) -> dict[str, Any]:
    """What updates are made with, as a checkpoint holds it: options for all, and those of each module by its name."""
    return {
        **{name: getattr(config, name) for name in FOR_ALL},
        "modules": {
            module: {
                "lr": own.peak,
                "warmup_steps": own.warmup_steps,
                "weight_decay": own.weight_decay,
                "schedule": _course(own.schedule),
            }
            for module, own in rates.items()
        },
    }


def used_rates(names: Iterable[str], frozen: Sequence[str]) -> list[str]:
    """Those of rates that anything is updated with: not of frozen modules, nor of towers beside a projector's own."""
    known = list(names)
    trained = {name: training_of(name.removesuffix(PROJECTOR), frozen) for name in known}
    alone = {n for n in known if trained[n] == TOWER_FROZEN and n + PROJECTOR in known}
    return [name for name in known if trained[name] != "frozen" and name not in alone]


def changes(before: TrainerState, settings: Mapping[str, Any], frozen: Sequence[str]) -> list[str]:
    """A line for each difference, old -> new.

    Args:
        before: of the checkpoint.
        settings: `update_settings` of the run that resumes.
        frozen: modules and parts of modules that it does not train.
    """
    modules: Mapping[str, Any] = settings["modules"]
    lines = list(_freezing(before, frozen, modules))
    told = before.optimizer
    theirs: Mapping[str, Any] = told.get("modules", {})
    both = _trained_in_both(before, modules, frozen)
    changed: dict[tuple[str, Any, Any], list[str]] = {}
    for name in FOR_ALL:
        if told.get(name, settings[name]) != settings[name]:
            changed[name, told[name], settings[name]] = []
    for part in both:
        module = part.removesuffix(PROJECTOR)
        then = theirs.get(part, theirs[module])
        for name, new in modules.get(part, modules[module]).items():
            old = then.get(name, new)
            if old != new:
                changed.setdefault((name, old, new), []).append(part)
    for (name, old, new), of in changed.items():
        whose = f" of {', '.join(of)}" if of else ""
        lines.append(f"optimizer.{name}{whose}: {_shown(old)} -> {_shown(new)}")
    return lines


def _trained_in_both(before: TrainerState, modules: Mapping[str, Any], frozen: Sequence[str]) -> list[str]:
    """Modules, and projectors that have rates of their own before or now, that both runs update."""
    theirs: Mapping[str, Any] = before.optimizer.get("modules", {})
    unused = {*modules} - {*used_rates(modules, frozen)} | {*theirs} - {*used_rates(theirs, before.frozen)}
    parts = dict.fromkeys([*modules, *theirs])
    modules_of_both = modules.keys() & theirs.keys()
    return [part for part in parts if part not in unused and part.removesuffix(PROJECTOR) in modules_of_both]


_TRAINED: Final = ("frozen", TOWER_FROZEN, "trained")
"""How modules are trained, the least first."""


def _freezing(before: TrainerState, frozen: Sequence[str], modules: Mapping[str, Any]) -> Iterator[str]:
    for name in modules:
        then, now = (training_of(name, parts) for parts in (before.frozen, frozen))
        if _TRAINED.index(now) > _TRAINED.index(then):
            thawed = f"{name}{PROJECTOR}" if now == TOWER_FROZEN else name
            lr = _shown(modules.get(thawed, modules[name])["lr"])
            yield f"{name}: {then} -> {now} with lr {lr}; its moments begin at zero"
        elif now != then:
            yield f"{name}: {then} -> {now}; its moments end with this checkpoint"


def _course(schedule: Schedule) -> str:
    """The factor of the learning rate after the warm-up, in words."""
    if schedule.course is Course.CONSTANT:
        return str(schedule.course)
    falls = f"{schedule.course}, falls from step {schedule.begin} in {schedule.steps} steps"
    return f"{falls} to {schedule.min_ratio:g}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"
