"""The options of `trainclient memory`: all options of a run; help shows those that memory depends on."""

from typing import Annotated, Final

import tyro
from pydantic import Field, create_model

from trainclient.training.config import REQUIRED, TrainConfig

_ASKED: Final = ("job", "servers", "tls_ca", "tls_cert", "tls_key", "token_file", "first_answer_s")
_COUNTED: Final = frozenset({*_ASKED, "models", "encoder", "backbone", "generator", "modules", "contrastive", "dtype"})


class MemoryConfig(TrainConfig):
    """A run, and a device for it."""

    memory_gb: Annotated[Annotated[float, Field(gt=0, le=1e6)] | None, REQUIRED] = None
    """Memory of a device that modules may use, in 10^9 bytes (90 % of an H100 is 72)."""

    @property
    def memory_bytes(self) -> int:
        """What modules may use of a device; ValueError if it is not given."""
        if self.memory_gb is None:
            raise ValueError(
                "--memory-gb is missing; the memory of a device that modules may use, in 10^9 bytes, is required"
            )
        return int(self.memory_gb * 1e9)


SHOWN: Final = create_model(
    "MemoryConfig",
    __base__=MemoryConfig,
    **{  # type: ignore[call-overload]
        name: (Annotated[field.annotation, *field.metadata, tyro.conf.Suppress], field)
        for name, field in TrainConfig.model_fields.items()
        if name not in _COUNTED
    },
)
"""For help: the others are taken, so that what starts a run can be given as it stands, and change nothing."""
