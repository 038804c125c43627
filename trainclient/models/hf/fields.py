"""Fields of a `config.json`, understood or refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, Final

from trainclient.models.hf.files import PretrainedError

MAX_SIZE: Final = 1 << 20
"""Largest width, vocabulary or number of heads: beyond any model, and small enough to multiply."""
MAX_LAYERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of an object of a `config.json`, with the defaults of its family."""

    data: Mapping[str, Any]
    """All of them, as they are."""
    where: str
    """What the object is called in errors: a file, and the path in it."""

    def has(self, name: str) -> bool:
        """Whether a field is given, and not null."""
        return self.data.get(name) is not None

    def refusal(self, name: str, required: str) -> PretrainedError:
        """What to raise for a field: its value, and what would be understood."""
        return PretrainedError(f"{self.where}: {name} is {self.data.get(name)!r:.200}; {required}")

    def value(self, name: str, default: Any = None) -> Any:
        """A field as it is; the default where it is not given, or null."""
        found = self.data.get(name)
        return default if found is None else found

    def integer(self, name: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An integer in [1, most]."""
        value = self.value(name, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.refusal(name, f"an integer from 1 to {most} is required")
        return value

    def root(self, name: str, default: int) -> int:
        """The number whose square a field is."""
        square = self.integer(name, default)
        root = isqrt(square)
        if root**2 != square:
            raise self.refusal(name, "the square of a number is required")
        return root

    def number(self, name: str, default: float | None = None) -> float:
        """A field that must be a positive, finite number."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise self.refusal(name, "a positive number is required")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A field that must be true or false."""
        value = self.value(name, default)
        if type(value) is not bool:
            raise self.refusal(name, "true or false is required")
        return value

    def choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """What our models call one of some names."""
        value = self.value(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(name, f"our models have {', '.join(sorted(choices))}")
        return choices[value]

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same fields, and others where none are given."""
        return Fields(
            {**defaults, **{name: value for name, value in self.data.items() if value is not None}}, self.where
        )

    def require(self, name: str, value: Any, reason: str) -> None:
        """Refuse a field that is given with another value."""
        found = self.data.get(name)
        if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
            raise self.refusal(name, f"{value!r} is required: {reason}")

    def within(self, name: str) -> "Fields":
        """The fields of an object in a field; none, where it is not given."""
        value = self.value(name, {})
        if not isinstance(value, dict):
            raise self.refusal(name, "an object is required")
        return Fields(value, f"{self.where}, {name}")
