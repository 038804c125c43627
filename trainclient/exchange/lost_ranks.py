"""Errors of torch.distributed when another process is gone, as one exception of ours."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

_SOURCE_LOCATION = re.compile(r"^\[[^\]]*\]\s*(err == 0\. )?")


class RankLostError(RuntimeError):
    """Another process ended, or did not answer in time."""


def plain_text(error: BaseException) -> str:
    """The text of an error of torch, without the location in its source."""
    return _SOURCE_LOCATION.sub("", str(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the device or machine has run out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextmanager
def translate_rank_errors(ranks: str) -> Iterator[None]:
    """Turn what a backend raises when another rank is gone into RankLostError; `ranks` names it."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise _lost(ranks, error) from error


@contextmanager
def translate_torch_rank_errors() -> Iterator[None]:
    """Turn only errors of torch.distributed into RankLostError, around code that may raise others too.

    This is for collectives that torch itself calls: FSDP2's, DTensor's, and those of checkpoints.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "/gloo/" in str(error):
            raise _lost("other ranks", error) from error
        raise


def _lost(ranks: str, error: RuntimeError) -> RankLostError:
    reason = plain_text(error).split(". ")[0].splitlines()
    return RankLostError(
        f"lost contact to {ranks} ({reason[0] if reason else type(error).__name__}); see what the process that ended "
        "first has reported"
    )
