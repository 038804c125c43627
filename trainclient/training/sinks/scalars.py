"""The numbers of a step by name, for sinks that draw them."""

from dataclasses import asdict

from trainclient.training.metrics import StepMetrics

_NAMES = frozenset({"step", "sample_digest"})


def _names(key: str) -> bool:
    """Whether it names something, and so is nothing to draw."""
    return key.rpartition("/")[2] in _NAMES


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """All numbers that a step has; those of modules as `lr/llm`, of an evaluation as `evaluation/text_loss`."""
    found: dict[str, float] = {}
    for name, value in asdict(metrics).items():
        parts = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        found |= {key: float(part) for key, part in parts.items() if part is not None and not _names(key)}
    return found
