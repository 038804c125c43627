"""The numbers of a step by name, for sinks that draw them."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from trainclient.training.metrics import StepMetrics

_NAMES = frozenset({"step", "sample_digest"})


def _names(key: str) -> bool:
    """Whether it names something, and so is nothing to draw."""
    return key.rpartition("/")[2] in _NAMES


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """All numbers that a step has; those of modules as `lr/llm`, of an evaluation as `evaluation/text_loss`."""
    return {key: float(value) for key, value in _flat("", asdict(metrics)) if value is not None and not _names(key)}


def _flat(within: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All values in mappings of mappings, by the ways to them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(f"{within}{name}/", value)
        else:
            yield f"{within}{name}", value
