"""What a run that resumes updates otherwise than the run that wrote its checkpoint: rates, and which modules.

Nothing of it is read back. A checkpoint holds moments and counts of updates alone, so that the configuration decides
every rate from the first step after it; what is saved here says what differs.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainclient.checkpoint.state import TrainerState
from trainclient.training.optimizer_config import Course, OptimizerConfig
from trainclient.training.schedule import ModuleRates, Schedule

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


def changes(before: TrainerState, settings: Mapping[str, Any], frozen: Collection[str]) -> list[str]:
    """A line for each difference, old -> new.

    Args:
        before: of the checkpoint.
        settings: `update_settings` of the run that resumes.
        frozen: modules that it does not train.
    """
    modules: Mapping[str, Any] = settings["modules"]
    lines = list(_freezing(before, frozen, modules))
    told = before.optimizer
    theirs: Mapping[str, Any] = told.get("modules", {})
    both = [name for name in modules if name in theirs and name not in {*frozen, *before.frozen}]
    changed: dict[tuple[str, Any, Any], list[str]] = {}
    for name in FOR_ALL:
        if told.get(name, settings[name]) != settings[name]:
            changed[name, told[name], settings[name]] = []
    for module in both:
        for name, new in modules[module].items():
            old = theirs[module].get(name, new)
            if old != new:
                changed.setdefault((name, old, new), []).append(module)
    for (name, old, new), of in changed.items():
        whose = f" of {', '.join(of)}" if of else ""
        lines.append(f"optimizer.{name}{whose}: {_shown(old)} -> {_shown(new)}")
    return lines


def _freezing(before: TrainerState, frozen: Collection[str], modules: Mapping[str, Any]) -> Iterator[str]:
    for name in modules:
        if name in before.frozen and name not in frozen:
            lr = _shown(modules[name]["lr"])
            yield f"{name}: frozen -> trained with lr {lr}; its moments begin at zero"
        if name in frozen and name not in before.frozen:
            yield f"{name}: trained -> frozen; its moments end with this checkpoint"


def _course(schedule: Schedule) -> str:
    """The factor of the learning rate after the warm-up, in words."""
    if schedule.course is Course.CONSTANT:
        return str(schedule.course)
    falls = f"{schedule.course}, falls from step {schedule.begin} in {schedule.steps} steps"
    return f"{falls} to {schedule.min_ratio:g}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"
